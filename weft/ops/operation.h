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

/// The smallest unit of a pipeline: a description that can run forward and backward. It holds no tensor: parameters
/// arrive with each call, and what backward needs is saved through the context.
class BasicOp {
 public:
  virtual ~BasicOp() = default;

  virtual std::string_view name() const = 0;
  virtual std::vector<FieldValue> fields() const = 0;

  virtual std::vector<ParamSpec> params() const { return {}; }
  virtual int extra_inputs() const { return 0; }
  virtual int extra_outputs() const { return 0; }
  /// Names of the slots it may fill for backward.
  virtual std::vector<std::string> saved_names() const { return {}; }
  /// The slot that holds the weight in the compute dtype and stays empty where that is the parameter itself; -1: none.
  virtual int weight_slot() const { return -1; }
  virtual DtypeRule dtype_rule() const { return DtypeRule::input; }
  /// True if training and evaluation differ.
  virtual bool depends_on_training() const { return false; }
  /// True if the main output is x itself or a view of it.
  virtual bool output_is_input(const OpPlan&) const { return false; }
  /// True if it may overwrite its first extra tensor (forward: extra input; backward: gradient of the extra output).
  virtual bool in_place() const { return false; }
  /// True if extra input i is a list of integers that says which rows belong together; it has no gradient.
  virtual bool is_index(int /*extra*/) const { return false; }
  /// True if callers may say where its output and the gradient of x go.
  virtual bool takes_buffers() const { return false; }
  /// True for operations written in Python: they live in this process only and may keep free attributes for backward.
  virtual bool process_local() const { return false; }

  /// Which kernels compute it in `dtype` on `device`, and why no faster ones. For `explain()`.
  virtual kernels::TierChoice kernel(c10::DeviceType, at::ScalarType /*dtype*/, bool /*backward*/) const { return {}; }

  /// Sizes and dtypes of what `forward` makes. Raises ValueError for sizes that either pass could not compute with:
  /// backward runs after this check alone. `params` have the shapes of `params()`.
  virtual Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra,
                         c10::ArrayRef<Spec> params) const = 0;
  virtual Flops flops(const OpPlan& /*plan*/, const Spec& /*x*/) const { return {}; }
  /// y of x; extra outputs through the context.
  virtual at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const = 0;
  /// dx of dy (undefined unless wanted); other gradients through the context. `dy` may be undefined, meaning zero, only
  /// if the operation has extra outputs.
  virtual at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const = 0;

  /// True if weight gradients wait for `backward_dw`, which computes those of the oldest backward of `params`; false if
  /// none wait. To be called below autograd.
  virtual bool delays_wgrad() const { return false; }
  virtual bool backward_dw(Params /*params*/) const { return false; }

  /// Name(field=value, …), with every field, or with those only that differ from their defaults.
  std::string text() const;
  std::string brief() const;
  bool operator==(const BasicOp& other) const { return text() == other.text(); }
};

/// Fields from `Self::Options`; an operation derives from Op<Self>.
template <class Self>
class Op : public BasicOp {
 public:
  std::vector<FieldValue> fields() const override { return list_fields(static_cast<const Self*>(this)->options()); }
};

using OpPtr = std::shared_ptr<const BasicOp>;

}  // namespace weft::ops
