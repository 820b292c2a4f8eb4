#include "weft/ops/basic_linear.h"

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "weft/ops/parallel.h"
#include "weft/ops/registry.h"
#include "weft/ops/rows.h"
#include "weft/tensor/ownership.h"

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

at::Tensor BasicLinear::product(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& bias) const {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == weight.size(1), "Linear: input has shape ", x.sizes(),
                    ", the weight takes ", weight.size(1), " features; the last dimension must equal them.");
  const auto dtype = ctx.dtype(weight.scalar_type());
  const auto w = as_dtype(weight, dtype);
  auto input = as_dtype(x, dtype);
  const auto matrix = as_matrix(input);
  auto y = bias.defined() ? at::addmm(as_dtype(bias, dtype), matrix, w.t()) : at::mm(matrix, w.t());
  y = like_leading(y, x);
  if (ctx.param_wanted(0)) ctx.save(kInput, std::move(input));
  if (ctx.input_wanted() && !w.is_same(weight)) ctx.save(kCastWeight, w);
  return y;
}

at::Tensor BasicLinear::gradients(OpContext& ctx, const at::Tensor& dy, Params params, at::Tensor add) const {
  const auto& cast = ctx.saved(kCastWeight);
  const auto& w = cast.defined() ? cast : params[0];
  const auto& x = ctx.saved(kInput);
  const auto grad = as_matrix(as_dtype(dy, (x.defined() ? x : w).scalar_type()));
  if (ctx.param_wanted(0)) ctx.set_param_grad(0, at::mm(grad.t(), as_matrix(x)));
  if (!ctx.input_wanted()) return {};
  if (!add.defined()) return like_leading(at::mm(grad, w), dy);
  if (add.scalar_type() != w.scalar_type()) return at::add(like_leading(at::mm(grad, w), dy), add);
  if (sole_owner(add) && add.is_contiguous()) {
    as_matrix(add).addmm_(grad, w);
    return add;
  }
  return like_leading(at::addmm(as_matrix(add), grad, w), dy);
}

at::Tensor BasicLinear::forward(OpContext& ctx, const at::Tensor& x, Params params) const {
  return product(ctx, x, params[0], {});
}

at::Tensor BasicLinear::backward(OpContext& ctx, const at::Tensor& dy, Params params) const {
  return gradients(ctx, dy, params, {});
}

static const Register<BasicLinear> basic_linear{"BasicLinear", "y = x Wᵀ.", {.in_features = 8, .out_features = 4}};

}  // namespace weft::ops
