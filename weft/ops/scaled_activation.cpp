#include "weft/ops/scaled_activation.h"

#include "weft/ops/activation_op.h"
#include "weft/ops/registry.h"

namespace weft::ops {

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

/// The gated activation of the options. The fused grouped MLP recomputes the unary activations only.
template <class Options>
static kernels::Act scaled_act(std::string_view op, const Options& options) {
  TORCH_CHECK_VALUE(!options.activation_recompute_in_mlp, op, ": activation_recompute_in_mlp is true, but ", op,
                    " does not support activation recomputation. Leave it false.");
  return gated_act(op, options);
}

static kernels::Act act_of(const ScaledTanhSReLU::Options& o) {
  check_positive("ScaledTanhSReLU", "tanh_clamp_scale", o.tanh_clamp_scale);
  return {.kind = kernels::ActKind::tanh_srelu, .beta1 = o.tanh_clamp_scale};
}

ScaledSReLU::ScaledSReLU(Options options) : ScaledActivation({.kind = kernels::ActKind::srelu}), options_(options) {}
ScaledTanhSReLU::ScaledTanhSReLU(Options options) : ScaledActivation(act_of(options)), options_(options) {}
ScaledSwiGLU::ScaledSwiGLU(Options options)
    : ScaledActivation(scaled_act("ScaledSwiGLU", options)), options_(options) {}
ScaledSiTUGLU::ScaledSiTUGLU(Options options)
    : ScaledActivation(scaled_act("ScaledSiTUGLU", options)), options_(options) {}
ScaledClampedQGeGLU::ScaledClampedQGeGLU(Options options)
    : ScaledActivation(scaled_act("ScaledClampedQGeGLU", options)), options_(options) {}

static const std::string kScales =
    "The scales s, one per row, are an extra input: the routing probabilities of a mixture of experts. They keep their "
    "dtype, and the result is rounded once.";
static const std::string kScaledGatedShape =
    "Input: ``(*, 2 * n)``.\nExtra input: one scale per row of the input, in any shape.\nOutput: ``(*, n)``.";
static const std::string kScaledShape =
    "Input: ``(*, n)``.\nExtra input: one scale per row of the input, in any shape.\nOutput: ``(*, n)``.";
static const std::string kInputs = "torch.randn(2, 8), torch.rand(2)";

static const Register<ScaledSReLU> scaled_srelu{
    "ScaledSReLU",
    {.summary = "Applies the squared ReLU and scales each row: y[row] = s[row]·max(x[row], 0)².",
     .details = kScales,
     .shape = kScaledShape,
     .example_inputs = kInputs},
    {}};
static const Register<ScaledTanhSReLU> scaled_tanh_srelu{
    "ScaledTanhSReLU",
    {.summary = "Squares the tanh-clamped ReLU and scales each row: y[row] = s[row]·(c·tanh(max(x[row], 0)/c))².",
     .details = "c is tanh_clamp_scale. " + kScales,
     .shape = kScaledShape,
     .example_inputs = kInputs},
    {.tanh_clamp_scale = 2}};
static const Register<ScaledSwiGLU> scaled_swiglu{
    "ScaledSwiGLU",
    {.summary = "Applies SwiGLU and scales each row: y[row] = s[row]·SwiGLU(x[row]).",
     .details = kScales,
     .shape = kScaledGatedShape,
     .example_inputs = kInputs,
     .example_shape = "[2, 4]"},
    {.glu_interleave_size = 2}};
static const Register<ScaledSiTUGLU> scaled_situglu{
    "ScaledSiTUGLU",
    {.summary = "Applies SiTUGLU and scales each row: y[row] = s[row]·SiTUGLU(x[row]).",
     .details = kScales,
     .shape = kScaledGatedShape,
     .example_inputs = kInputs,
     .example_shape = "[2, 4]"},
    {.beta1 = 3.0, .beta2 = 12.0}};
static const Register<ScaledClampedQGeGLU> scaled_clamped{
    "ScaledClampedQGeGLU",
    {.summary = "Applies ClampedSwiGLU and scales each row: y[row] = s[row]·ClampedSwiGLU(x[row]).",
     .details = kScales,
     .shape = kScaledGatedShape,
     .example_inputs = kInputs,
     .example_shape = "[2, 4]"},
    {.limit = 0.75}};

}  // namespace weft::ops
