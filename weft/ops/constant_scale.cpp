#include "weft/ops/constant_scale.h"

#include <ATen/ops/mul.h>
#include <c10/core/DefaultDtype.h>

#include "weft/ops/registry.h"

namespace weft::ops {

Inferred ConstantScale::infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  const auto dtype = at::isIntegralType(x.dtype, true) ? c10::get_default_dtype_as_scalartype() : x.dtype;
  return {.y = x.as(dtype)};
}

at::Tensor ConstantScale::forward(OpContext&, const at::Tensor& x, Params) const { return at::mul(x, options_.scale); }

at::Tensor ConstantScale::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  return ctx.needs_input_grad() ? at::mul(dy, options_.scale) : at::Tensor{};
}

static const Register<ConstantScale> constant_scale{
    "ConstantScale", {.summary = "Multiplies by a constant: y = x·scale.", .shape = kSameShape}, {.scale = -2.5}};

}  // namespace weft::ops
