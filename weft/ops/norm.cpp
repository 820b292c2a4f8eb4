#include "weft/ops/norm.h"

#include <ATen/ops/add.h>

#include "weft/kernels/norm.h"
#include "weft/kernels/opmath.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {
namespace {

void check_options(std::string_view op, const NormOptions& o) {
  TORCH_CHECK_VALUE(!o.normalized_shape.empty(), op, ": normalized_shape is empty, expected at least one dimension.");
  for (const auto size : o.normalized_shape)
    TORCH_CHECK_VALUE(size >= 0, op, ": normalized_shape is ", at::IntArrayRef(o.normalized_shape),
                      ", expected sizes of 0 or more.");
  check_eps(op, o.eps);
  check_param_dtype(op, o.dtype);
}

ParamSpec weight_spec(const NormOptions& o) {
  return {"weight", o.normalized_shape, o.dtype, o.zero_centered_gamma ? Init::zeros : Init::ones,
          BackwardRead::always};
}

/// x in the compute dtype.
at::Tensor input_of(const OpContext& ctx, const at::Tensor& x, const at::Tensor& weight) {
  const auto row = static_cast<size_t>(weight.dim());
  const bool ends_in_row = x.sizes().size() >= row && x.sizes().slice(x.dim() - row) == weight.sizes();
  TORCH_CHECK_VALUE(ends_in_row, "input has shape ", x.sizes(), ", normalized_shape is ", weight.sizes(),
                    "; expected the trailing dimensions to equal it.");
  return as_dtype(x, ctx.dtype(weight.scalar_type()));
}

/// γ' in the opmath dtype of `dtype`.
at::Tensor gamma_of(const NormOptions& o, const at::Tensor& weight, at::ScalarType dtype) {
  const auto gamma = as_dtype(weight, at::toOpMathType(dtype));
  return o.zero_centered_gamma ? at::add(gamma, 1) : gamma;
}

Spec input_spec(const OpPlan& plan, const Spec& x, const Spec& weight) {
  const c10::SymIntArrayRef sizes(x.sizes), row(weight.sizes);
  const bool ends_in_row = sizes.size() >= row.size() && same_sizes(sizes.slice(sizes.size() - row.size()), row);
  TORCH_CHECK_VALUE(ends_in_row, "input has shape ", sizes, ", normalized_shape is ", row,
                    "; expected the trailing dimensions to equal it.");
  return x.as(plan.dtype(weight.dtype));
}

/// The sizes of x with those of the row replaced by 1.
Spec statistic_spec(const Spec& input, const Spec& weight) {
  auto spec = input.as(at::toOpMathType(input.dtype));
  std::fill(spec.sizes.end() - weight.sizes.size(), spec.sizes.end(), c10::SymInt(1));
  return spec;
}

/// The kernel adds `addend` before rounding if it has the dtype of dx (`fused_addend`); otherwise `add_unfused` adds it
/// afterwards.
at::Tensor fused_addend(const at::Tensor& addend, at::ScalarType dtype) {
  return addend.defined() && addend.scalar_type() == dtype ? addend : at::Tensor{};
}
at::Tensor add_unfused(const at::Tensor& dx, const at::Tensor& addend) {
  const bool rest = dx.defined() && addend.defined() && addend.scalar_type() != dx.scalar_type();
  return rest ? at::add(addend, dx) : dx;
}

}  // namespace

NormOp::NormOp(std::string_view name, Options options) : options_(std::move(options)) { check_options(name, options_); }

std::vector<ParamSpec> LayerNorm::params() const {
  const auto& o = options();
  if (!o.bias) return {weight_spec(NormOp::options())};
  return {weight_spec(NormOp::options()), {"bias", o.normalized_shape, o.dtype, Init::zeros}};
}

Inferred LayerNorm::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const {
  const auto input = input_spec(plan, x, params[kWeight]);
  Inferred out{.y = input};
  out.saved.resize(3);
  const auto statistic = statistic_spec(input, params[kWeight]);
  if (plan.needs_grad) out.saved = {saved_input(x, input.dtype), statistic, statistic};
  return out;
}

static kernels::LayerNormForward run_layer_norm(const NormOptions& o, const at::Tensor& input, Params params,
                                                bool keep) {
  const auto dtype = input.scalar_type();
  at::Tensor beta;
  if (params.size() > LayerNorm::kBias) beta = as_dtype(params[LayerNorm::kBias], at::toOpMathType(dtype));
  return kernels::layer_norm_forward(input, gamma_of(o, params[LayerNorm::kWeight], dtype), beta, o.eps, keep);
}

at::Tensor LayerNorm::forward(OpContext& ctx, const at::Tensor& x, Params params) const {
  auto input = input_of(ctx, x, params[kWeight]);
  auto out = run_layer_norm(NormOp::options(), input, params, ctx.needs_grad());
  if (ctx.needs_grad()) {
    ctx.save(kInput, std::move(input));
    ctx.save(kMean, std::move(out.mean));
    ctx.save(kRstd, std::move(out.rstd));
  }
  return out.y;
}

at::Tensor LayerNorm::gradient(OpContext& ctx, const at::Tensor& dy, Params params, const at::Tensor& addend,
                               bool reuse) const {
  const auto& x = ctx.saved(kInput);
  const auto gamma = gamma_of(NormOp::options(), params[kWeight], x.scalar_type());
  const bool needs_dbeta = options_.bias && ctx.needs_param_grad(kBias);
  auto out = kernels::layer_norm_backward(dy, x, ctx.saved(kMean), ctx.saved(kRstd), gamma,
                                          {ctx.needs_input_grad(), ctx.needs_param_grad(kWeight), needs_dbeta},
                                          fused_addend(addend, x.scalar_type()), reuse);
  if (ctx.needs_param_grad(kWeight)) ctx.set_param_grad(kWeight, std::move(out.dgamma));
  if (needs_dbeta) ctx.set_param_grad(kBias, std::move(out.dbeta));
  return add_unfused(out.dx, addend);
}

at::Tensor LayerNorm::recompute(const OpContext& ctx, Params params) const {
  return run_layer_norm(NormOp::options(), ctx.saved(kInput), params, /*keep=*/false).y;
}

std::vector<ParamSpec> RMSNorm::params() const { return {weight_spec(options())}; }

Inferred RMSNorm::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const {
  const auto input = input_spec(plan, x, params[kWeight]);
  Inferred out{.y = input};
  out.saved.resize(2);
  if (plan.needs_grad) out.saved = {saved_input(x, input.dtype), statistic_spec(input, params[kWeight])};
  return out;
}

at::Tensor RMSNorm::forward(OpContext& ctx, const at::Tensor& x, Params params) const {
  auto input = input_of(ctx, x, params[kWeight]);
  const auto gamma = gamma_of(options(), params[kWeight], input.scalar_type());
  auto out = kernels::rms_norm_forward(input, gamma, options().eps, ctx.needs_grad());
  if (ctx.needs_grad()) {
    ctx.save(kInput, std::move(input));
    ctx.save(kRstd, std::move(out.rstd));
  }
  return out.y;
}

at::Tensor RMSNorm::gradient(OpContext& ctx, const at::Tensor& dy, Params params, const at::Tensor& addend,
                             bool reuse) const {
  const auto& x = ctx.saved(kInput);
  const auto gamma = gamma_of(options(), params[kWeight], x.scalar_type());
  auto out = kernels::rms_norm_backward(dy, x, ctx.saved(kRstd), gamma,
                                        {ctx.needs_input_grad(), ctx.needs_param_grad(kWeight)},
                                        fused_addend(addend, x.scalar_type()), reuse);
  if (ctx.needs_param_grad(kWeight)) ctx.set_param_grad(kWeight, std::move(out.dgamma));
  return add_unfused(out.dx, addend);
}

at::Tensor RMSNorm::recompute(const OpContext& ctx, Params params) const {
  const auto& x = ctx.saved(kInput);
  const auto gamma = gamma_of(options(), params[kWeight], x.scalar_type());
  return kernels::rms_norm_forward(x, gamma, options().eps, /*keep=*/false).y;
}

static const std::string kPrecision = "The statistics are computed in float32 (float64 for float64).";
static const std::string kGamma =
    "weight: ``normalized_shape``, γ; initially ones. With zero_centered_gamma γ is 1 + weight, initially zeros.";
static const std::string kShape = "Input: ``(*, normalized_shape)``.\nOutput: same as the input.";

static const Register<LayerNorm> layer_norm{
    "LayerNorm",
    {.summary = "Applies layer normalization over the trailing dimensions: y = (x - mean)·γ/√(var + eps) + β.",
     .details = kPrecision,
     .parameters = kGamma + "\nbias: ``normalized_shape``, β; initially zeros; None with bias=False.",
     .shape = kShape,
     .example_inputs = "torch.randn(3, 2, 4)",
     .example_shape = "[3, 2, 4]"},
    {.normalized_shape = {2, 4}, .eps = 0.3}};
static const Register<RMSNorm> rms_norm{
    "RMSNorm",
    {.summary = "Applies RMS normalization over the trailing dimensions: y = x·γ/√(mean(x²) + eps).",
     .details = kPrecision,
     .parameters = kGamma,
     .shape = kShape},
    {.normalized_shape = {8}, .eps = 0.3, .zero_centered_gamma = true}};

}  // namespace weft::ops
