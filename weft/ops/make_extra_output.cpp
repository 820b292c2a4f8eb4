#include "weft/ops/make_extra_output.h"

#include <ATen/ops/add.h>

#include "weft/core/ownership.h"
#include "weft/ops/registry.h"

namespace weft::ops {

Inferred MakeExtraOutput::infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  return {.y = x, .extra_outputs = {x}};
}

at::Tensor MakeExtraOutput::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  ctx.set_extra_output(0, x);
  return x;
}

at::Tensor MakeExtraOutput::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  auto g = ctx.take_extra_output_grad(0);
  if (!ctx.needs_input_grad()) return {};
  if (!g.defined()) return dy;
  if (!dy.defined()) return g;
  const bool fits = g.scalar_type() == dy.scalar_type() && g.sizes() == dy.sizes();
  return in_place() && fits && sole_owner(g) ? g.add_(dy) : at::add(g, dy);
}

static const Register<MakeExtraOutput> make_extra_output{
    "MakeExtraOutput",
    {.summary = "Returns the input twice, as the output and as an extra output: y = e = x.",
     .details = "The gradients of both are added.",
     .shape = "Input: ``(*)``, any shape.\nOutput and extra output: same as the input."},
    {}};

}  // namespace weft::ops
