#include "weft/ops/soft_cap.h"

#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>

#include "weft/kernels/opmath.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {

SoftCap::SoftCap(Options options) : options_(options) {
  TORCH_CHECK_VALUE(std::isfinite(options_.cap) && options_.cap > 0, "SoftCap: cap is ", options_.cap,
                    ", expected a finite positive number.");
}

Inferred SoftCap::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  const auto input = x.as(plan.dtype(x.dtype));
  Inferred out{.y = input};
  out.saved.resize(1);
  if (plan.needs_input_grad) out.saved[kInput] = saved_input(x, input.dtype);
  return out;
}

at::Tensor SoftCap::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  auto input = as_dtype(x, ctx.dtype(x.scalar_type()));
  auto y = at::div(kernels::to_opmath(input), options_.cap).tanh_().mul_(options_.cap);
  y = as_dtype(y, input.scalar_type());
  if (ctx.needs_input_grad()) ctx.save(kInput, std::move(input));
  return y;
}

at::Tensor SoftCap::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (!ctx.needs_input_grad()) return {};
  const auto& input = ctx.saved(kInput);
  const auto tanh = at::div(kernels::to_opmath(input), options_.cap).tanh_();
  const auto dx = at::mul(kernels::to_opmath(dy), at::mul(tanh, tanh).neg_().add_(1));
  return as_dtype(dx, input.scalar_type());
}

static const Register<SoftCap> soft_cap{
    "SoftCap", {.summary = "Bounds the magnitude smoothly: y = cap·tanh(x / cap).", .shape = kSameShape}, {.cap = 2}};

}  // namespace weft::ops
