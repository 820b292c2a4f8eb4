#include "weft/ops/l2_normalization.h"

#include "weft/kernels/norm.h"
#include "weft/kernels/opmath.h"
#include "weft/ops/registry.h"

namespace weft::ops {

L2Normalization::L2Normalization(Options options) : options_(options) { check_eps("L2Normalization", options.eps); }

Inferred L2Normalization::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  TORCH_CHECK_VALUE(!x.sizes.empty(), "input is a scalar, expected at least 1 dimension.");
  Inferred out{.y = x};
  out.saved.resize(2);
  if (plan.needs_input_grad) out.saved = {saved_input(x, x.dtype), x.with_last(1).as(at::toOpMathType(x.dtype))};
  return out;
}

at::Tensor L2Normalization::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  TORCH_CHECK_VALUE(x.dim() > 0, "input is a scalar, expected at least 1 dimension.");
  auto out = kernels::l2_norm_forward(x, options_.eps);
  if (ctx.needs_input_grad()) {
    ctx.save(kInput, x);
    ctx.save(kRnorm, std::move(out.rnorm));
  }
  return out.y;
}

at::Tensor L2Normalization::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  return ctx.needs_input_grad() ? kernels::l2_norm_backward(dy, ctx.saved(kInput), ctx.saved(kRnorm)) : at::Tensor{};
}

static const Register<L2Normalization> l2_normalization{
    "L2Normalization",
    {.summary = "Divides by the L2 norm of the last dimension: y = x / √(Σ x² + eps).",
     .details = "Computed in float32 (float64 for float64). Autocast does not change the dtype of the output.",
     .shape = "Input: ``(*, n)``.\nOutput: same as the input."},
    {}};

}  // namespace weft::ops
