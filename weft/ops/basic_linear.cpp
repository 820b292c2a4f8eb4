#include "weft/ops/basic_linear.h"

#include "weft/ops/parallel.h"
#include "weft/ops/registry.h"
#include "weft/ops/rows.h"

namespace weft::ops {

BasicLinear::BasicLinear(Options options) : options_(std::move(options)) {
  TORCH_CHECK_VALUE(options_.in_features >= 0 && options_.out_features >= 0, "BasicLinear: in_features ",
                    options_.in_features, " and out_features ", options_.out_features, " must be 0 or more.");
  TORCH_CHECK_VALUE(at::isFloatingType(options_.dtype), "BasicLinear: dtype is ", dtype_name(options_.dtype),
                    ", expected float32, float64, float16 or bfloat16.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !options_.accumulate_into_main_grad,
      "BasicLinear: accumulate_into_main_grad is true, but this version returns weight gradients "
      "through autograd only. Leave it false and add .grad to main_grad yourself.");
  refuse_parallel("BasicLinear", options_.tensor_parallel_size);
}

std::vector<ParamSpec> BasicLinear::params() const {
  return {
      {"weight", {options_.out_features, options_.in_features}, options_.dtype, Init::fan_in_uniform, Read::for_input}};
}

Inferred BasicLinear::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const {
  const auto dtype = plan.autocast == at::ScalarType::Undefined ? params[0].dtype : plan.autocast;
  Inferred out{.y = x.with_last(params[0].sizes[0]).as(dtype), .extra_outputs = {}, .saved = {}};
  out.saved.resize(2);
  if (plan.param_wanted[0]) out.saved[kInput] = x.as(dtype);
  if (plan.input_wanted && params[0].dtype != dtype) out.saved[kCastWeight] = params[0].as(dtype);
  return out;
}

kernels::GemmResult BasicLinear::product(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                         kernels::Epilogue epilogue) const {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == weight.size(1), "Linear: input has shape ", x.sizes(),
                    ", the weight takes ", weight.size(1), " features; the last dimension must equal them.");
  const auto dtype = ctx.dtype(weight.scalar_type());
  const auto w = as_dtype(weight, dtype);
  auto input = as_dtype(x, dtype);
  auto result = kernels::gemm(as_matrix(input), w.t(), std::move(epilogue));
  result.out = like_leading(result.out, x);
  if (result.pre.defined()) result.pre = like_leading(result.pre, x);
  if (ctx.param_wanted(0)) ctx.save(kInput, std::move(input));
  if (ctx.input_wanted() && !w.is_same(weight)) ctx.save(kCastWeight, w);
  return result;
}

kernels::GemmResult BasicLinear::input_gradient(OpContext& ctx, const at::Tensor& dy, Params params,
                                                kernels::Epilogue epilogue) const {
  if (!ctx.input_wanted()) return {};
  const auto& cast = ctx.saved(kCastWeight);
  const auto& w = cast.defined() ? cast : params[0];
  auto result = kernels::gemm(as_matrix(as_dtype(dy, w.scalar_type())), w, std::move(epilogue));
  result.out = like_leading(result.out, dy);
  if (result.again.defined()) result.again = like_leading(result.again, dy);
  return result;
}

void BasicLinear::weight_gradient(OpContext& ctx, const at::Tensor& dy, double scale) const {
  if (!ctx.param_wanted(0)) return;
  const auto& x = ctx.saved(kInput);
  const auto grad = as_matrix(as_dtype(dy, x.scalar_type()));
  ctx.set_param_grad(0, kernels::gemm(grad.t(), as_matrix(x), {.scale = scale}).out);
}

at::Tensor BasicLinear::forward(OpContext& ctx, const at::Tensor& x, Params params) const {
  return product(ctx, x, params[0], {}).out;
}

at::Tensor BasicLinear::backward(OpContext& ctx, const at::Tensor& dy, Params params) const {
  weight_gradient(ctx, dy);
  return input_gradient(ctx, dy, params, {}).out;
}

static const Register<BasicLinear> basic_linear{"BasicLinear", "y = x Wᵀ.", {.in_features = 8, .out_features = 4}};

}  // namespace weft::ops
