#include "weft/ops/basic_linear.h"

#include "weft/ops/leading_dims.h"
#include "weft/ops/parallel.h"
#include "weft/ops/registry.h"
#include "weft/ops/wgrad_sink.h"
#include "weft/overlap/schedules.h"

namespace weft::ops {
namespace {

WgradOptions wgrad_options(const BasicLinear::Options& options) {
  return {.accumulate = options.accumulate_into_main_grad, .delay = options.delay_wgrad_compute};
}

}  // namespace

BasicLinear::BasicLinear(Options options) : options_(std::move(options)) {
  TORCH_CHECK_VALUE(options_.in_features >= 0, "BasicLinear: in_features is ", options_.in_features,
                    ", expected 0 or more.");
  TORCH_CHECK_VALUE(options_.out_features >= 0, "BasicLinear: out_features is ", options_.out_features,
                    ", expected 0 or more.");
  check_param_dtype("BasicLinear", options_.dtype);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !options_.delay_wgrad_compute || !options_.userbuffers_options,
      "BasicLinear: delay_wgrad_compute and userbuffers_options cannot be combined. Set only one of them.");
  auto& ranks = options_.tensor_parallel_size;
  ranks = parallel() ? resolve_group_size("BasicLinear", options_.tensor_parallel_group, ranks) : 1;
  if (ranks == 1) {
    options_.tensor_parallel_mode.reset();
    options_.tensor_parallel_group.reset();
    options_.sequence_parallel = false;
  }
  if (column()) divide_evenly("BasicLinear", "out_features", options_.out_features, ranks);
  if (row()) divide_evenly("BasicLinear", "in_features", options_.in_features, ranks);
}

int64_t BasicLinear::local_in_features() const {
  return options_.in_features / (row() ? options_.tensor_parallel_size : 1);
}
int64_t BasicLinear::local_out_features() const {
  return options_.out_features / (column() ? options_.tensor_parallel_size : 1);
}

std::vector<ParamSpec> BasicLinear::params() const {
  return {{.name = "weight",
           .shape = {local_out_features(), local_in_features()},
           .dtype = options_.dtype,
           .init = Init::fan_in_uniform,
           .backward_read = BackwardRead::for_input_grad,
           .fan_in = options_.fan_in.value_or(options_.in_features),
           .supports_main_grad = true}};
}

kernels::TierChoice BasicLinear::kernel(const TierQuery& q) const {
  const auto n = local_out_features(), k = local_in_features();
  return q.backward ? kernels::choose_gemm_tier(q.device, q.dtype, k, n)
                    : kernels::choose_gemm_tier(q.device, q.dtype, n, k);
}

Inferred BasicLinear::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const {
  const bool fits = !x.sizes.empty() && same_size(x.sizes.back(), params[0].sizes[1]);
  TORCH_CHECK_VALUE(fits, "input has shape ", x.sizes, ", expected ", params[0].sizes[1],
                    " features in the last dimension.");
  TORCH_CHECK_VALUE(!options_.sequence_parallel || x.sizes.size() > 1, "input has shape ", x.sizes,
                    ", expected at least 2 dimensions: sequence_parallel shards the first one.");
  const auto dtype = plan.dtype(params[0].dtype);
  Inferred out{.y = x.with_last(params[0].sizes[0]).as(dtype)};
  if (gathers_input()) out.y.sizes[0] = x.sizes[0] * options_.tensor_parallel_size;
  if (gathers_output_gradient()) out.y.sizes[0] = x.sizes[0] / options_.tensor_parallel_size;
  out.saved.resize(3);
  if (plan.recipe) {
    infer_saved_copies(plan, x, params[0], out);
    return out;
  }
  if (plan.needs_param_grad[0]) out.saved[kInput] = saved_input(x, dtype);
  if (plan.needs_input_grad && params[0].dtype != dtype) out.saved[kWeight] = params[0].as(dtype);
  return out;
}

Flops BasicLinear::flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>) const {
  const int64_t ranks = gathers_input() ? options_.tensor_parallel_size : 1;
  const auto gemm = 2 * x.rows() * ranks * local_in_features() * local_out_features();
  return {.forward = gemm, .backward = gemm * (int{plan.needs_input_grad} + int{plan.needs_param_grad[0] != 0})};
}

// ---- communication ------------------------------------------------------------------------------------------------

comm::Work BasicLinear::gather_input(const at::Tensor& x) const {
  return gathers_input() ? group().all_gather(x) : comm::Work(x);
}

comm::Work BasicLinear::reduce_output(const at::Tensor& y) const {
  if (!reduces_output()) return y;
  return options_.sequence_parallel ? group().reduce_scatter(y) : group().all_reduce(y);
}

comm::Work BasicLinear::gather_output_gradient(const at::Tensor& dy) const {
  return gathers_output_gradient() ? group().all_gather(dy) : comm::Work(dy);
}

comm::Work BasicLinear::reduce_input_gradient(const at::Tensor& dx) const {
  if (!reduces_input_gradient() || !dx.defined()) return dx;
  return options_.sequence_parallel ? group().reduce_scatter(dx) : group().all_reduce(dx);
}

// ---- GEMMs --------------------------------------------------------------------------------------------------------

void BasicLinear::check_input(const at::Tensor& x, const at::Tensor& weight) const {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == weight.size(1), "input has shape ", x.sizes(), ", expected ",
                    weight.size(1), " features in the last dimension.");
  TORCH_CHECK_VALUE(!options_.sequence_parallel || x.dim() > 1, "input has shape ", x.sizes(),
                    ", expected at least 2 dimensions: sequence_parallel shards the first one.");
}

BasicLinear::Operands BasicLinear::operands(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight) const {
  check_input(x, weight);
  const auto dtype = ctx.dtype(weight.scalar_type());
  Operands out{as_dtype(x, dtype), as_dtype(weight, dtype)};
  if (ctx.needs_param_grad(0)) ctx.save(kInput, out.x);
  if (ctx.needs_input_grad() && !out.w.is_same(weight)) ctx.save(kWeight, out.w);
  return out;
}

at::Tensor BasicLinear::restore_gathered(const at::Tensor& matrix, const at::Tensor& local, bool gathered) const {
  if (!gathered) return restore_leading_dims(matrix, local);
  auto sizes = local.sizes().vec();
  sizes.front() *= options_.tensor_parallel_size;
  sizes.back() = matrix.size(1);
  return matrix.view(sizes);
}

kernels::GemmResult BasicLinear::local_gemm(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                            kernels::Epilogue epilogue, comm::Transport* transport) const {
  if (ctx.plan().recipe) return quantized_gemm(ctx, x, weight, epilogue, transport);
  const auto [local, w] = operands(ctx, x, weight);
  const bool gathers = gathers_input();
  epilogue.b_is_weight = true;
  auto result = transport ? overlap::all_gather_gemm(*transport, as_matrix(local), kernels::transposed(w), epilogue)
                          : kernels::gemm(as_matrix(gathers ? gather_input(local).wait() : local),
                                          kernels::transposed(w), epilogue);
  result.out = restore_gathered(result.out, local, gathers);
  if (result.pre_act.defined()) result.pre_act = restore_gathered(result.pre_act, local, gathers);
  return result;
}

kernels::GemmResult BasicLinear::forward_gemm(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                              kernels::Epilogue epilogue, comm::Transport* transport) const {
  TORCH_CHECK(!reduces_output(), "BasicLinear: y is reduced over ranks, so the GEMM cannot apply an epilogue to it.");
  return local_gemm(ctx, x, weight, std::move(epilogue), transport);
}

const at::Tensor& BasicLinear::backward_weight(const OpContext& ctx, Params params) const {
  const auto& cast = ctx.saved(kWeight);
  return cast.defined() ? cast : params[0];
}

at::ScalarType BasicLinear::backward_dtype(const OpContext& ctx, const at::Tensor& dy, Params params) const {
  return ctx.dtype((params[0].defined() ? params[0] : dy).scalar_type());  // W is kept for dx only
}

OutputGradient BasicLinear::prepare_output_gradient(OpContext& ctx, const Gradient& dy, Params params) const {
  if (ctx.plan().recipe)
    return quantize_output_gradient(ctx, as_dtype(dy.value, backward_dtype(ctx, dy.value, params)));
  auto all = gather_output_gradient(dy.value).wait();
  return all.is_same(dy.value) ? dy : Gradient(std::move(all));
}

BasicLinear::SavedInput BasicLinear::gather_saved_input(OpContext& ctx, at::ScalarType dtype,
                                                        at::IntArrayRef sizes) const {
  if (!ctx.needs_param_grad(0)) return {at::Tensor()};
  if (ctx.plan().recipe) return gather_saved_copies(ctx, dtype, sizes);
  return {gather_input(ctx.saved(kInput))};
}

kernels::GemmResult BasicLinear::local_input_gradient(OpContext& ctx, const OutputGradient& dy, Params params,
                                                      kernels::Epilogue epilogue) const {
  if (!ctx.needs_input_grad()) return {};
  epilogue.b_is_weight = true;
  auto result = multiply_by_weight(ctx, dy, params, epilogue);
  const auto restore = [&](at::Tensor& t) {
    if (t.defined()) t = restore_leading_dims(t, dy.sizes);
  };
  restore(result.out);
  restore(result.act_output);
  return result;
}

kernels::GemmResult BasicLinear::input_gradient(OpContext& ctx, const OutputGradient& dy, Params params,
                                                kernels::Epilogue epilogue) const {
  TORCH_CHECK(!reduces_input_gradient(),
              "BasicLinear: dx is reduced over ranks, so the GEMM cannot apply an epilogue to it.");
  return local_input_gradient(ctx, dy, params, std::move(epilogue));
}

int64_t BasicLinear::packed_dy_min_rows(const OpPlan& plan) const {
  constexpr int64_t kMinRows = 512;  // with fewer rows, packing costs as much as it saves
  return plan.needs_param_grad[0] && !options_.delay_wgrad_compute && !plan.recipe ? kMinRows : 0;
}

bool BasicLinear::uses_packed_dy(const OpPlan& plan, const at::Tensor& dy) const {
  const auto min_rows = packed_dy_min_rows(plan);
  return min_rows > 0 && has_rows(dy.sizes(), min_rows);
}

void BasicLinear::weight_gradient(OpContext& ctx, const OutputGradient& dy, double scale) const {
  if (ctx.needs_param_grad(0)) weight_gradient_of_saved(ctx, dy, gather_saved_input(ctx, dy.dtype(), dy.sizes), scale);
}

void BasicLinear::weight_gradient_of(OpContext& ctx, const OutputGradient& dy, const at::Tensor& x, double scale,
                                     const std::function<void()>* progress) const {
  if (!ctx.needs_param_grad(0)) return;
  if (const auto q = requantized_input(ctx, dy, x))
    weight_gradient_of_copies(ctx, dy, *q, scale);
  else
    plain_weight_gradient(ctx, dy.values, x, scale, progress);
}

void BasicLinear::weight_gradient_of_saved(OpContext& ctx, const OutputGradient& dy, SavedInput saved,
                                           double scale) const {
  const auto x = saved.work.wait();
  if (saved.copies)
    weight_gradient_of_copies(ctx, dy, saved_copies(ctx, dy, saved, x), scale);
  else
    weight_gradient_of(ctx, dy, x, scale);
}

void BasicLinear::plain_weight_gradient(OpContext& ctx, const Gradient& dy, const at::Tensor& x, double scale,
                                        const std::function<void()>* progress) const {
  const auto wgrad = wgrad_options(options_);
  WgradGemm gemm{.dy = as_dtype(dy.value, x.scalar_type()), .x = x, .scale = scale};
  if (!wgrad.delay) {
    gemm.progress = progress;
    if (gemm.dy.is_same(dy.value)) gemm.packed_dy = dy.packed;
  }
  ops::weight_gradient(ctx, wgrad, 0, 1, std::move(gemm));
}

void BasicLinear::weight_gradient_by(OpContext& ctx, std::function<at::Tensor(const at::Tensor&, bool)> compute) const {
  ops::weight_gradient(ctx, wgrad_options(options_), 0, 1, {.compute = std::move(compute)});
}

bool BasicLinear::backward_dw(Params params) const {
  return delays_wgrad() && ops::backward_dw(wgrad_options(options_), params);
}

// ---- forward and backward -----------------------------------------------------------------------------------------

at::Tensor BasicLinear::forward(OpContext& ctx, const at::Tensor& x, Params params) const {
  auto y = local_gemm(ctx, x, params[0], {}).out;
  return reduces_output() ? reduce_output(y).wait() : y;
}

/// Overlaps the all-gather of x with the dx GEMM, and the reduction of dx with the dW GEMM.
at::Tensor BasicLinear::backward(OpContext& ctx, const at::Tensor& dy, Params params) const {
  if (!ctx.needs_grad()) return {};
  auto saved = gather_saved_input(ctx, backward_dtype(ctx, dy, params), dy.sizes());
  const auto gradient = prepare_output_gradient(ctx, ctx.with_packed(dy), params);
  auto reducing_dx = reduce_input_gradient(local_input_gradient(ctx, gradient, params, {}).out);
  if (ctx.needs_param_grad(0)) weight_gradient_of_saved(ctx, gradient, std::move(saved), 1);
  return reducing_dx.wait();
}

static const Register<BasicLinear> basic_linear{
    "BasicLinear",
    {.summary = "Multiplies by a weight: y = x Wᵀ.",
     .details = "With tensor parallelism each rank holds a shard of W. A column linear returns a shard of y and "
                "all-reduces dx; a row linear takes a shard of x and all-reduces y.",
     .parameters = "weight: ``(out_features, in_features)``, this rank's shard with tensor parallelism; initially "
                   "uniform in ±1/√in_features.",
     .shape = "Input: ``(*, in_features)``; in row mode over p ranks ``(*, in_features / p)``.\nOutput: ``(*, "
              "out_features)``; in column mode over p ranks ``(*, out_features / p)``.",
     .example_shape = "[2, 4]"},
    {.in_features = 8, .out_features = 4}};

}  // namespace weft::ops
