#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weft/core/fields.h"
#include "weft/kernels/tier.h"
#include "weft/ops/context.h"
#include "weft/ops/spec.h"

namespace weft::ops {

/// A pass of an operation, for the choice of its kernel.
struct TierQuery {
  c10::DeviceType device;
  at::ScalarType dtype;  // the compute dtype
  bool backward = false;
  bool training = true;
};

/// The smallest unit of a pipeline. A stateless description that runs forward and backward: parameters are passed to
/// each call, and tensors for backward are saved through the context.
class BasicOp {
 public:
  virtual ~BasicOp() = default;

  virtual std::string_view name() const = 0;
  virtual std::vector<FieldValue> fields() const = 0;

  virtual std::vector<ParamSpec> params() const { return {}; }
  virtual int extra_inputs() const { return 0; }
  virtual int extra_outputs() const { return 0; }
  /// Names of the slots that forward may save for backward, for `explain()`.
  virtual std::vector<std::string> saved_names() const { return {}; }
  /// The slot that holds the weight in the compute dtype, empty if that is the parameter itself; -1 if there is none.
  virtual int weight_slot() const { return -1; }
  virtual DtypeRule dtype_rule() const { return DtypeRule::any; }
  /// True if recipes quantize the operands of its GEMMs. Its last slot then holds the recipe (saved_recipe.h).
  virtual bool quantizes() const { return false; }
  /// True if training and evaluation mode differ.
  virtual bool depends_on_training() const { return false; }
  /// True if the main output is x itself or a view of it.
  virtual bool output_is_input(const OpPlan&) const { return false; }
  /// True if it may overwrite its first extra tensor (forward: extra input, backward: gradient of the extra output).
  virtual bool in_place() const { return false; }
  /// True if the extra input holds integers (split sizes of groups, class indices); it has no gradient.
  virtual bool is_index(int /*extra*/) const { return false; }
  /// True if callers may pass buffers for its output and for dx.
  virtual bool takes_buffers() const { return false; }
  /// True for operations written in Python: they cannot be serialized and may keep arbitrary state for backward.
  virtual bool process_local() const { return false; }

  /// The kernel tier that a pass uses, and why faster tiers are not used. For `explain()`.
  virtual kernels::TierChoice kernel(const TierQuery&) const { return {}; }

  /// Specs of what `forward` returns and saves. Raises ValueError for sizes that either pass does not support: backward
  /// relies on this check. `params` have the shapes given by `params()`.
  virtual Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra,
                         c10::ArrayRef<Spec> params) const = 0;
  /// Returns the FLOPs of its GEMMs. `extra` are the extra inputs.
  virtual Flops flops(const OpPlan& /*plan*/, const Spec& /*x*/, c10::ArrayRef<Spec> /*extra*/) const { return {}; }
  /// Returns y. Sets extra outputs through the context.
  virtual at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const = 0;
  /// Returns dx, undefined if not needed. Sets the other gradients through the context. An undefined `dy` means zero
  /// and occurs only if the operation has extra outputs.
  virtual at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const = 0;

  /// The number of rows from which a packed transpose of dy makes `backward` faster; 0: it is not used.
  virtual int64_t packed_dy_min_rows(const OpPlan&) const { return 0; }

  /// True if weight gradients are delayed until `backward_dw`.
  virtual bool delays_wgrad() const { return false; }
  /// Computes the weight gradients delayed by the oldest backward of `params`; false if none are pending. Call it below
  /// autograd.
  virtual bool backward_dw(Params /*params*/) const { return false; }

  /// Name(field=value, …) with every field.
  std::string text() const;
  /// The same with only the fields that differ from their defaults.
  std::string brief() const;
  bool operator==(const BasicOp& other) const { return text() == other.text(); }
};

/// Raises ValueError unless parameters can have this dtype.
void check_param_dtype(std::string_view op, at::ScalarType dtype);

/// Raises ValueError unless `eps`, which is added below a square root, is finite and not negative.
void check_eps(std::string_view op, double eps);

/// CRTP base of operations: takes the fields from `Self::Options`.
template <class Self>
class Op : public BasicOp {
 public:
  std::vector<FieldValue> fields() const override { return list_fields(static_cast<const Self*>(this)->options()); }
};

using OpPtr = std::shared_ptr<const BasicOp>;

}  // namespace weft::ops
