#include "weft/ops/bias.h"

#include <ATen/ops/add.h>

#include "weft/comm/group.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/parallel.h"
#include "weft/ops/registry.h"

namespace weft::ops {

Bias::Bias(Options options) : options_(std::move(options)) {
  TORCH_CHECK_VALUE(options_.size >= 0, "Bias: size is ", options_.size, ", expected 0 or more.");
  check_param_dtype("Bias", options_.dtype);
  TORCH_CHECK_VALUE(!options_.tensor_parallel || !options_.sequence_parallel,
                    "Bias: tensor_parallel shards the bias, sequence_parallel replicates it; set only one of them.");
  const bool parallel = options_.tensor_parallel || options_.sequence_parallel;
  auto& ranks = options_.tensor_parallel_size;
  ranks = parallel ? resolve_group_size("Bias", options_.tensor_parallel_group, ranks) : 1;
  if (options_.tensor_parallel) divide_evenly("Bias", "size", options_.size, ranks);
  if (ranks > 1) return;
  options_.tensor_parallel = options_.sequence_parallel = false;
  options_.tensor_parallel_group.reset();
}

std::vector<ParamSpec> Bias::params() const {
  const auto size = options_.tensor_parallel ? options_.size / options_.tensor_parallel_size : options_.size;
  return {{"bias", {size}, options_.dtype, Init::zeros}};
}

Inferred Bias::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const {
  const bool fits = !x.sizes.empty() && same_size(x.sizes.back(), params[0].sizes[0]);
  TORCH_CHECK_VALUE(fits, "input has shape ", x.sizes, ", expected last dimension ", params[0].sizes[0],
                    ", the size of the bias.");
  const bool autocast = plan.autocast != at::ScalarType::Undefined;
  return {.y = autocast ? x : x.as(c10::promoteTypes(x.dtype, params[0].dtype))};
}

at::Tensor Bias::forward(OpContext& ctx, const at::Tensor& x, Params params) const {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == params[0].size(0), "input has shape ", x.sizes(),
                    ", expected last dimension ", params[0].size(0), ", the size of the bias.");
  const bool autocast = ctx.plan().autocast != at::ScalarType::Undefined;
  return at::add(x, autocast ? as_dtype(params[0], x.scalar_type()) : params[0]);
}

at::Tensor Bias::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (ctx.needs_param_grad(0)) set_gradient(ctx, sum_rows(dy));
  return ctx.needs_input_grad() ? dy : at::Tensor{};
}

void Bias::set_gradient(OpContext ctx, at::Tensor local_db) const {
  if (options_.sequence_parallel) {
    const comm::Group group(*options_.tensor_parallel_group, options_.tensor_parallel_size);
    local_db = group.all_reduce(local_db).wait();
  }
  ctx.set_param_grad(0, std::move(local_db));
}

static const Register<Bias> bias{
    "Bias",
    {.summary = "Adds a bias to each row: y = x + b.",
     .details = "Under autocast the bias is cast to the dtype of the input; otherwise torch's type promotion applies.",
     .parameters = "bias: ``(size)``, this rank's shard with tensor_parallel; initially zeros.",
     .shape = "Input: ``(*, size)``; with tensor_parallel over p ranks ``(*, size / p)``.\nOutput: same as the input."},
    {.size = 8}};

}  // namespace weft::ops
