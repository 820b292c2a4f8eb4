#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <vector>

namespace weft::ops {

enum class Init { zeros, ones, fan_in_uniform };

/// When backward reads the values of a parameter: never, for dx, or for any gradient.
enum class BackwardRead { never, for_input_grad, always };

/// An operation's description of a parameter. The tensor is owned by a module.
struct ParamSpec {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  Init init = Init::zeros;
  BackwardRead backward_read = BackwardRead::never;
  int64_t fan_in = 0;               // for fan_in_uniform: uniform in ±1/√fan_in
  bool supports_main_grad = false;  // its gradient goes to a WgradSink and may be delayed until backward_dw
  bool any_shape = false;           // operations written in Python: `shape` and `dtype` are unknown
};

/// Sizes (possibly symbolic) and dtype of a tensor that need not exist.
struct Spec {
  c10::SmallVector<c10::SymInt, 4> sizes;
  at::ScalarType dtype = at::kFloat;

  static Spec of(const at::Tensor& t);
  /// A copy with the last size replaced. Raises ValueError for a scalar.
  Spec with_last(c10::SymInt size) const;
  Spec as(at::ScalarType other) const { return {sizes, other}; }
  c10::SymInt numel() const;
  /// The product of all sizes but the last.
  c10::SymInt rows() const;
};

/// Whether two sizes are equal. For symbolic sizes the tracer records the equality.
bool same_size(const c10::SymInt& a, const c10::SymInt& b);
bool same_sizes(c10::SymIntArrayRef a, c10::SymIntArrayRef b);

/// Floating-point operations of the GEMMs in each pass, counted as torch.utils.flop_counter does.
struct Flops {
  c10::SymInt forward = 0, backward = 0;
};

/// Where the tensor of a saved slot comes from. A call that is one op of a graph does not return tensors that the graph
/// has already: slots that hold the caller's input or a parameter are dropped in forward and refilled in backward.
enum class SavedFrom {
  own_memory,  // any other tensor: a result, a converted copy, an extra input
  input,       // x itself
  parameter,   // a parameter itself
};

/// A tensor that forward saves for backward.
struct SavedSpec : Spec {
  SavedFrom from;
  int param;  // SavedFrom::parameter: its index in the operation's `params()`

  SavedSpec(Spec spec, SavedFrom source = SavedFrom::own_memory, int index = 0)
      : Spec(std::move(spec)), from(source), param(index) {}
};
/// A slot for x in the compute dtype: x itself, or a converted copy.
SavedSpec saved_input(const Spec& x, at::ScalarType dtype);

/// Specs of what one operation returns and saves. An empty entry of `saved` is a slot that stays empty.
struct Inferred {
  Spec y;
  std::vector<Spec> extra_outputs = {};
  std::vector<std::optional<SavedSpec>> saved = {};
};

}  // namespace weft::ops
