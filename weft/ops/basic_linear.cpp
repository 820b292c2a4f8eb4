#include "weft/ops/basic_linear.h"

#include "weft/ops/parallel.h"
#include "weft/ops/registry.h"
#include "weft/ops/rows.h"
#include "weft/ops/wgrad_sink.h"

namespace weft::ops {
namespace {

WgradOptions wgrad_options(const BasicLinear::Options& options) {
  return {.op = "BasicLinear", .accumulate = options.accumulate_into_main_grad, .delay = options.delay_wgrad_compute};
}

/// The weight itself. A gradient that leaves autograd's way needs to know whose it is.
at::Tensor parameter(const OpContext& ctx) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      ctx.leaves(),
      "BasicLinear: accumulate_into_main_grad and delay_wgrad_compute need the Parameter, which "
      "a compiled, exported or functional call does not carry. Run the module eagerly, or turn "
      "the options off.");
  auto leaf = ctx.leaves()->leaf(ctx.plan().param_base);
  TORCH_CHECK(leaf.defined(),
              "BasicLinear: accumulate_into_main_grad or delay_wgrad_compute is on, but the weight is computed from "
              "other tensors (a parametrization, a view of a flat parameter), so it has no main_grad or .grad of its "
              "own. Use a weight that is a Parameter, or turn the options off.");
  return leaf;
}

}  // namespace

BasicLinear::BasicLinear(Options options) : options_(std::move(options)) {
  TORCH_CHECK_VALUE(options_.in_features >= 0 && options_.out_features >= 0, "BasicLinear: in_features ",
                    options_.in_features, " and out_features ", options_.out_features, " must be 0 or more.");
  TORCH_CHECK_VALUE(at::isFloatingType(options_.dtype), "BasicLinear: dtype is ", dtype_name(options_.dtype),
                    ", expected float32, float64, float16 or bfloat16.");
  TORCH_CHECK_NOT_IMPLEMENTED(!options_.delay_wgrad_compute || !options_.userbuffers_options,
                              "BasicLinear: delay_wgrad_compute does not go with userbuffers_options; leave one out.");
  refuse_parallel("BasicLinear", options_.tensor_parallel_size);
}

std::vector<ParamSpec> BasicLinear::params() const {
  return {
      {"weight", {options_.out_features, options_.in_features}, options_.dtype, Init::fan_in_uniform, Read::for_input}};
}

kernels::Choice BasicLinear::kernel(c10::DeviceType device, at::ScalarType dtype, bool backward) const {
  const auto n = options_.out_features, k = options_.in_features;
  return backward ? kernels::gemm_choice(device, dtype, k, n) : kernels::gemm_choice(device, dtype, n, k);
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
  epilogue.weight = true;
  auto result = kernels::gemm(as_matrix(input), kernels::transposed(w), epilogue);
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
  epilogue.weight = true;
  auto result = kernels::gemm(as_matrix(as_dtype(dy, w.scalar_type())), w, epilogue);
  result.out = like_leading(result.out, dy);
  if (result.again.defined()) result.again = like_leading(result.again, dy);
  return result;
}

void BasicLinear::weight_gradient(OpContext& ctx, const at::Tensor& dy, double scale) const {
  if (ctx.param_wanted(0)) weight_gradient_of(ctx, dy, ctx.saved(kInput), scale);
}

void BasicLinear::weight_gradient_of(OpContext& ctx, const at::Tensor& dy, const at::Tensor& x, double scale) const {
  if (!ctx.param_wanted(0)) return;
  const auto how = wgrad_options(options_);
  WgradProduct product{.dy = as_dtype(dy, x.scalar_type()), .x = x, .scale = scale};
  at::Tensor param;
  if (how.accumulate || how.delay) {
    param = parameter(ctx);
    product.run = ctx.leaves()->run();
  }
  ctx.set_param_grad(0, ops::weight_gradient(how, param, std::move(product)));
}

bool BasicLinear::backward_dw(const at::Tensor& weight) const {
  return options_.delay_wgrad_compute && ops::backward_dw(wgrad_options(options_), weight);
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
