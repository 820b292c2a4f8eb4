#include "weft/ops/scaled_activation.h"

#include "weft/ops/activation_op.h"
#include "weft/ops/registry.h"

namespace weft::ops {

using kernels::Act;
using kernels::ActKind;

Inferred ScaledActivation::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra,
                                 c10::ArrayRef<Spec>) const {
  const auto input = x.as(plan.dtype(x.dtype));
  Inferred out{.y = activation_output(act_, input)};
  TORCH_CHECK_VALUE(!x.sizes.empty() && same_size(extra[0].numel(), x.rows()), "scales have shape ", extra[0].sizes,
                    ", input has shape ", x.sizes, "; expected one value per row.");
  out.saved.resize(2);
  if (plan.needs_grad) out.saved = {saved_input(x, input.dtype), extra[0]};
  return out;
}

void ScaledActivation::check_scales(const at::Tensor& x, const at::Tensor& scales) const {
  TORCH_CHECK_VALUE(x.dim() > 0, "input is a scalar, expected at least 1 dimension.");
  int64_t rows = 1;
  for (const auto size : x.sizes().slice(0, x.dim() - 1)) rows *= size;
  TORCH_CHECK_VALUE(scales.numel() == rows, "scales have shape ", scales.sizes(), ", input has shape ", x.sizes(),
                    ", that is ", rows, " rows; expected one value per row.");
}

at::Tensor ScaledActivation::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  TORCH_CHECK(
      !fused_only(), "activation_recompute_in_mlp is true, so it runs only inside a fused grouped MLP, ",
      "between two GroupedLinear operations of matching sizes and dtypes. Set it to false, or call explain() to see ",
      "why the fusion was rejected.");
  const auto& scales = ctx.extra_input(0);
  check_scales(x, scales);
  auto input = activation_input(act_, x, ctx.dtype(x.scalar_type()));
  auto y = kernels::scaled_activation_forward(act_, input, scales);
  if (ctx.needs_grad()) {
    ctx.save(kInput, std::move(input));
    ctx.save(kScales, scales);
  }
  return y;
}

at::Tensor ScaledActivation::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  auto [dx, dscales] = kernels::scaled_activation_backward(act_, dy, ctx.saved(kInput), ctx.saved(kScales),
                                                           ctx.needs_input_grad(), ctx.needs_extra_grad(0));
  if (dscales.defined()) ctx.set_extra_input_grad(0, std::move(dscales));
  return dx;
}

/// The fused grouped MLP recomputes SReLU only.
static void reject_recompute(std::string_view op, bool recompute) {
  TORCH_CHECK_VALUE(!recompute, op, ": activation_recompute_in_mlp is true, but ", op,
                    " does not support activation recomputation. Leave it false.");
}

static Act act_of(const ScaledSwiGLU::Options& o) {
  reject_recompute("ScaledSwiGLU", o.activation_recompute_in_mlp);
  return {.kind = ActKind::swiglu, .interleave = interleave_size("ScaledSwiGLU", o.glu_interleave_size)};
}

static Act act_of(const ScaledSiTUGLU::Options& o) {
  reject_recompute("ScaledSiTUGLU", o.activation_recompute_in_mlp);
  check_positive("ScaledSiTUGLU", "beta1", o.beta1);
  check_positive("ScaledSiTUGLU", "beta2", o.beta2);
  return {.kind = ActKind::situglu,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .interleave = interleave_size("ScaledSiTUGLU", o.glu_interleave_size)};
}

static Act act_of(const ScaledClampedQGeGLU::Options& o) {
  reject_recompute("ScaledClampedQGeGLU", o.activation_recompute_in_mlp);
  return {.kind = ActKind::clamped_swiglu,
          .limit = o.limit,
          .alpha = o.alpha,
          .offset = o.glu_linear_offset,
          .interleave = interleave_size("ScaledClampedQGeGLU", o.glu_interleave_size)};
}

ScaledSReLU::ScaledSReLU(Options options) : ScaledActivation({.kind = ActKind::srelu}), options_(options) {}
ScaledSwiGLU::ScaledSwiGLU(Options options) : ScaledActivation(act_of(options)), options_(options) {}
ScaledSiTUGLU::ScaledSiTUGLU(Options options) : ScaledActivation(act_of(options)), options_(options) {}
ScaledClampedQGeGLU::ScaledClampedQGeGLU(Options options) : ScaledActivation(act_of(options)), options_(options) {}

static const Register<ScaledSReLU> srelu{"ScaledSReLU", "y[row] = s[row]·max(x[row], 0)².", {}};
static const Register<ScaledSwiGLU> swiglu{
    "ScaledSwiGLU", "y[row] = s[row]·SwiGLU(x[row]).", {.glu_interleave_size = 2}};
static const Register<ScaledSiTUGLU> situglu{
    "ScaledSiTUGLU", "y[row] = s[row]·SiTUGLU(x[row]).", {.beta1 = 3.0, .beta2 = 12.0}};
static const Register<ScaledClampedQGeGLU> clamped{
    "ScaledClampedQGeGLU", "y[row] = s[row]·ClampedSwiGLU(x[row]).", {.limit = 0.75}};

}  // namespace weft::ops
