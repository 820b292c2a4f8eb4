#include "weft/ops/add_extra_input.h"

#include <ATen/ops/add.h>

#include "weft/core/ownership.h"
#include "weft/ops/registry.h"

namespace weft::ops {

Inferred AddExtraInput::infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec> extra, c10::ArrayRef<Spec>) const {
  TORCH_CHECK_VALUE(same_sizes(x.sizes, extra[0].sizes), "input has shape ", x.sizes, ", extra input has shape ",
                    extra[0].sizes, "; expected equal shapes.");
  return {.y = x.as(c10::promoteTypes(x.dtype, extra[0].dtype))};
}

at::Tensor AddExtraInput::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  auto e = ctx.take_extra_input(0);
  TORCH_CHECK_VALUE(e.sizes() == x.sizes(), "input has shape ", x.sizes(), ", extra input has shape ", e.sizes(),
                    "; expected equal shapes.");
  const bool fits = c10::promoteTypes(x.scalar_type(), e.scalar_type()) == e.scalar_type();
  return in_place() && fits && sole_owner(e) ? e.add_(x) : at::add(e, x);
}

at::Tensor AddExtraInput::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (ctx.needs_extra_grad(0)) ctx.set_extra_input_grad(0, dy);
  return ctx.needs_input_grad() ? dy : at::Tensor{};
}

static const Register<AddExtraInput> add_extra_input{
    "AddExtraInput",
    {.summary = "Adds an extra input: y = e + x.",
     .shape = "Input and extra input: ``(*)``, the same shape.\nOutput: same as the input.",
     .example_inputs = "torch.randn(2, 8), torch.randn(2, 8)"},
    {}};

}  // namespace weft::ops
