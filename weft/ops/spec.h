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

/// Specs of what one operation returns and saves. An empty entry of `saved` is a slot that stays empty.
struct Inferred {
  Spec y;
  std::vector<Spec> extra_outputs;
  std::vector<std::optional<Spec>> saved;
};

}  // namespace weft::ops
