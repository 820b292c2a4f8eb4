#include "weft/kernels/launch.h"
#include "weft/kernels/quantized_gemm.h"
#include "weft/ops/basic_linear.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/wgrad_sink.h"
#include "weft/overlap/schedules.h"
#include "weft/quant/delayed_scaling.h"
#include "weft/quant/observer.h"

// A linear whose operands a recipe quantizes, Q(t):
//   y = Q(x) Q(W)ᵀ;  dx = Q(dy) Q(W);  dW = Σ_rows Q(dy)ᵀ Q(x)
// Forward saves the columnwise copies of x and W. With a backward override it saves x and W themselves, or their
// rowwise copies, and backward multiplies dy by what these hold.
//
// Sequence parallelism: ranks quantize their rows and gather the copies, where these are smaller than the rows and have
// the bytes of the gathered matrix; otherwise they gather rows and quantize all of them.

namespace weft::ops {
namespace {

using kernels::QuantizedMatrix;
using quant::BackwardOverride;
using quant::Quantizer;

bool quantizes_gradient(const quant::Recipe& recipe) { return !recipe.backward_override; }
bool saves_originals(const quant::Recipe& recipe) {
  return recipe.backward_override == BackwardOverride::high_precision;
}

QuantizedMatrix quantize(const Quantizer& quantizer, const at::Tensor& matrix, const kernels::QuantizeArgs& args) {
  return kernels::quantize(matrix, quantizer.quantization(), args);
}

/// One tensor of the state of delayed scaling; undefined for other recipes.
struct DelayedTensor {
  at::Tensor state;
  int64_t index;

  bool defined() const { return state.defined(); }
  kernels::QuantizeArgs with_scale(kernels::QuantizeArgs args) const {
    if (defined()) args.scale = quant::delayed_scale(state, index);
    return args;
  }
  /// Quantizes with the scale of the state, and records the maximum magnitude there.
  QuantizedMatrix quantize(const Quantizer& quantizer, const at::Tensor& matrix,
                           const kernels::QuantizeArgs& args) const {
    auto q = ops::quantize(quantizer, matrix, with_scale(args));
    if (defined()) quant::record_amax(state, index, (q.rowwise.defined() ? q.rowwise : q.columnwise).amax);
    return q;
  }
};

/// This rank's rows of a matrix that is distributed over ranks, quantized with the scales of the whole matrix.
struct QuantizedRows {
  DistributedCopy copy;
  QuantizedMatrix local;

  QuantizedRows(const comm::Group& group, comm::Transport* transport, const Quantizer& quantizer,
                const DelayedTensor& delayed, const at::Tensor& x, uint64_t recipe, kernels::QuantizeArgs args)
      : copy{.quantization = quantizer.quantization(),
             .dtype = x.scalar_type(),
             .rows = as_matrix(x).size(0),
             .columns = x.size(-1),
             .leading_size = x.size(0),
             .recipe = recipe,
             .columnwise = false} {
    const auto rows = as_matrix(x);
    if (!delayed.defined()) args.amax = reduced_amax(group, transport, copy.quantization, rows, false);
    local = quantize(quantizer, rows, delayed.with_scale(args));
  }

  /// The rowwise copy of all rows.
  QuantizedMatrix gather(const comm::Group& group, comm::Transport* transport, const DelayedTensor& delayed) const {
    const auto& bytes = local.rowwise.bytes;
    auto all = join_copies(
        copy, transport ? gather_copies(*transport, copy, bytes) : gather_copies(group, copy, bytes).wait());
    if (delayed.defined()) quant::record_amax(delayed.state, delayed.index, all.rowwise.amax);
    return all;
  }
  /// epilogue(X Wᵀ) for X of all rows; with a transport they are multiplied as they arrive, if the recipe permits.
  kernels::GemmResult multiply(const comm::Group& group, comm::Transport* transport, const DelayedTensor& delayed,
                               const QuantizedMatrix& w, const kernels::Epilogue& epilogue) const {
    if (!transport || !kernels::multiplies_in_chunks(copy.quantization))
      return kernels::quantized_gemm({gather(group, transport, delayed)}, {w}, epilogue);
    at::Tensor amax;
    auto y = overlapped_gemm(*transport, copy, local, {w}, epilogue, delayed.defined() ? &amax : nullptr);
    if (delayed.defined()) quant::record_amax(delayed.state, delayed.index, amax);
    return y;
  }
};

/// The state of x (0), W (1) or, in backward, dy (0).
DelayedTensor delayed_tensor(const OpContext& ctx, at::Tensor Buffers::* which, int64_t index) {
  if (!ctx.plan().recipe->is_delayed()) return {};
  const auto* given = ctx.buffers();
  TORCH_CHECK_NOT_IMPLEMENTED(
      given && (given->*which).defined(),
      "delayed scaling needs the state of a Python module, which is not available in a compiled, "
      "exported or functional call, or in C++. Use Float8CurrentScaling.");
  return {given->*which, index};
}

/// W as the caller quantized it, or null.
const QuantizedMatrix* given_weight(const OpContext& ctx) {
  const auto* given = ctx.buffers();
  return given ? given->weight.get() : nullptr;
}

/// W as the caller quantized it, or else quantized here.
QuantizedMatrix quantize_weight(const OpContext& ctx, const at::Tensor& w, bool columnwise) {
  const auto& recipe = *ctx.plan().recipe;
  const auto* given = given_weight(ctx);
  if (!given)
    return delayed_tensor(ctx, &Buffers::forward_scaling, 1).quantize(recipe.weight, w, {.columnwise = columnwise});
  auto q = *given;
  TORCH_CHECK_VALUE(q.rows == w.size(0) && q.columns == w.size(1), "the caller's quantized weight has shape [", q.rows,
                    ", ", q.columns, "], expected ", w.sizes(), ".");
  TORCH_CHECK_VALUE(q.quantization == recipe.weight.quantization(),
                    "the caller's quantized weight was quantized with another recipe than that of this call.");
  TORCH_CHECK_VALUE(q.rowwise.defined() && (q.columnwise.defined() || !columnwise),
                    "the caller's quantized weight has no ", q.rowwise.defined() ? "columnwise" : "rowwise", " copy.");
  q.dtype = w.scalar_type();
  return q;
}

/// The copy that backward reads, as one tensor.
const at::Tensor& saved_bytes(const quant::Recipe& recipe, const QuantizedMatrix& q) {
  return (quantizes_gradient(recipe) ? q.columnwise : q.rowwise).bytes;
}

/// What `saved_bytes` returned, as a matrix again.
QuantizedMatrix saved_matrix(const quant::Recipe& recipe, const Quantizer& quantizer, at::ScalarType dtype,
                             int64_t rows, int64_t columns, const at::Tensor& bytes) {
  return kernels::matrix_of_copy(quantizer.quantization(), dtype, rows, columns, quantizes_gradient(recipe), bytes);
}

Spec saved_spec(const quant::Recipe& recipe, const Quantizer& quantizer, const Spec& matrix) {
  const kernels::CopySizes<c10::SymInt> sizes(quantizer.quantization(), matrix.rows(), matrix.sizes.back(),
                                              quantizes_gradient(recipe));
  return {.sizes = {sizes.bytes()}, .dtype = at::kByte};
}

uint64_t seed_of(const at::Tensor& saved_recipe) {
  return static_cast<uint64_t>(rounding_seed(saved_recipe).item<int64_t>());
}

}  // namespace

void BasicLinear::infer_saved_copies(const OpPlan& plan, const Spec& x, const Spec& weight, Inferred& out) const {
  const auto& recipe = *plan.recipe;
  const bool originals = saves_originals(recipe);
  const auto dtype = out.y.dtype;
  if (plan.needs_param_grad[0])
    out.saved[kInput] =
        originals || requantizes_input(recipe) ? saved_input(x, dtype) : SavedSpec(saved_spec(recipe, recipe.input, x));
  if (plan.needs_input_grad && !originals) out.saved[kWeight] = saved_spec(recipe, recipe.weight, weight);
  if (plan.needs_input_grad && originals && weight.dtype != dtype) out.saved[kWeight] = weight.as(dtype);
  if (plan.needs_grad) out.saved[kRecipe] = saved_recipe_spec(recipe);
}

// ---- forward ------------------------------------------------------------------------------------------------------

kernels::GemmResult BasicLinear::quantized_gemm(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                                const kernels::Epilogue& epilogue, comm::Transport* transport) const {
  check_input(x, weight);
  TORCH_CHECK_NOT_IMPLEMENTED(!kernels::launch_hook(), "recorded launches of quantized linears are not supported.");
  const auto& recipe = *ctx.plan().recipe;
  const bool originals = saves_originals(recipe), needs_dw = ctx.needs_param_grad(0), needs_dx = ctx.needs_input_grad();
  const auto dtype = ctx.dtype(weight.scalar_type());
  const auto local = as_dtype(x, dtype), w = as_dtype(weight, dtype), rows = as_matrix(local);
  const auto observer = quant::observer();
  const bool copies_x = needs_dw && !originals && !requantizes_input(recipe);
  if (needs_dw && recipe.input.random_hadamard_transform && quantizes_gradient(recipe)) {
    const auto all_rows = rows.size(0) * (gathers_input() ? options_.tensor_parallel_size : 1);
    kernels::check_hadamard(rows.new_empty({all_rows, 0}));
  }

  const auto delayed_x = delayed_tensor(ctx, &Buffers::forward_scaling, 0);
  const kernels::QuantizeArgs args{.columnwise =
                                       copies_x && quantizes_gradient(recipe) && (ctx.saves(kInput) || observer)};
  QuantizedMatrix q_x;  // of `observed`: this rank's rows, or those of all ranks if they exchange values
  auto observed = rows;
  std::optional<QuantizedRows> distributed;
  if (!gathers_input()) {
    q_x = delayed_x.quantize(recipe.input, rows, args);
  } else if (copies_concatenate(recipe.input.quantization(), rows.size(0), false)) {
    distributed.emplace(group(), transport, recipe.input, delayed_x, local, recipe_hash(recipe), args);
    q_x = distributed->local;
  } else {
    observed =
        transport ? overlap::OverlappedAllGather(*transport, rows).wait() : as_matrix(gather_input(local).wait());
    q_x = quantize(recipe.input, observed, {});
  }
  const auto q_w = quantize_weight(ctx, w, needs_dx && quantizes_gradient(recipe));

  if (needs_dw && ctx.saves(kInput)) ctx.save(kInput, copies_x ? saved_bytes(recipe, q_x) : local);
  if (needs_dx && !originals) ctx.save(kWeight, saved_bytes(recipe, q_w));
  if (needs_dx && originals) {
    if (given_weight(ctx))
      ctx.save(kWeight, kernels::dequantize(q_w, false, dtype));  // the Parameter has no values of its own
    else if (!w.is_same(weight))
      ctx.save(kWeight, w);
  }
  const auto saved = save_recipe(recipe, ctx.needs_grad());
  if (saved.defined()) ctx.save(kRecipe, saved);
  if (observer) observer->observe_forward(call_number(saved), weight, {observed, q_x}, {w, q_w});
  auto result = distributed ? distributed->multiply(group(), transport, delayed_x, q_w, epilogue)
                            : kernels::quantized_gemm({q_x}, {q_w}, epilogue);
  result.out = restore_gathered(result.out, local, gathers_input());
  if (result.pre_act.defined()) result.pre_act = restore_gathered(result.pre_act, local, gathers_input());
  return result;
}

// ---- backward -----------------------------------------------------------------------------------------------------

BasicLinear::SavedInput BasicLinear::gather_saved_copies(OpContext& ctx, at::ScalarType dtype,
                                                         at::IntArrayRef sizes) const {
  const auto& recipe = *ctx.plan().recipe;
  const auto& x = ctx.saved(kInput);
  if (saves_originals(recipe)) return {gather_input(x)};
  if (!gathers_input()) return {x, true};
  const auto ranks = options_.tensor_parallel_size;
  const bool columnwise = quantizes_gradient(recipe);
  const auto how = recipe.input.quantization();
  const DistributedCopy copy{.quantization = how,
                             .dtype = dtype,
                             .rows = c10::multiply_integers(sizes.slice(0, sizes.size() - 1)) / ranks,
                             .columns = local_in_features(),
                             .leading_size = sizes[0] / ranks,
                             .recipe = recipe_hash(recipe),
                             .columnwise = columnwise};
  if (requantizes_input(recipe) && !copies_concatenate(how, copy.rows, columnwise)) return {gather_input(x)};
  auto bytes = x;
  if (requantizes_input(recipe)) {
    const bool transformed = columnwise && how.hadamard;
    const auto amax = reduced_amax(group(), nullptr, how, as_matrix(x), transformed);
    bytes = saved_bytes(recipe, quantize(recipe.input, as_matrix(x),
                                         {.rowwise = !columnwise,
                                          .columnwise = columnwise,
                                          .amax = transformed ? at::Tensor() : amax,
                                          .transformed_amax = transformed ? amax : at::Tensor()}));
  }
  return {gather_copies(group(), copy, bytes), true, copy};
}

OutputGradient BasicLinear::quantize_output_gradient(OpContext& ctx, const at::Tensor& dy) const {
  const auto& recipe = *ctx.plan().recipe;
  const auto observer = quant::observer();
  const auto observe = [&](const at::Tensor& rows, const QuantizedMatrix& q) {
    if (observer) observer->observe_backward(call_number(ctx.saved(kRecipe)), {rows, q});
  };
  if (!quantizes_gradient(recipe)) {
    observe(as_matrix(dy), {});
    return Gradient(gather_output_gradient(dy).wait());
  }
  if (!ctx.needs_grad()) return Gradient(gather_output_gradient(dy).wait());
  const auto delayed = delayed_tensor(ctx, &Buffers::backward_scaling, 0);
  const bool needs_dw = ctx.needs_param_grad(0);
  // With one scale, codes of one byte are all that the ranks need: the columnwise copy is the transposed one.
  if (gathers_output_gradient() && recipe.grad_output.quantization().block == 0) {
    const QuantizedRows rows(group(), nullptr, recipe.grad_output, delayed, dy, recipe_hash(recipe), {});
    auto all = rows.gather(group(), nullptr, delayed);
    if (needs_dw) add_columnwise(all);
    observe(as_matrix(dy), rows.local);
    auto sizes = dy.sizes().vec();
    sizes[0] *= options_.tensor_parallel_size;
    return {{}, std::move(all), sizes};
  }
  OutputGradient out = Gradient(gather_output_gradient(dy).wait());
  const auto rows = as_matrix(out.values.value);
  out.quantized = delayed.quantize(recipe.grad_output, rows,
                                   {.rowwise = ctx.needs_input_grad() || observer,
                                    .columnwise = needs_dw,
                                    .random = {.seed = seed_of(ctx.saved(kRecipe))}});
  observe(rows, *out.quantized);
  return out;
}

kernels::GemmResult BasicLinear::multiply_by_weight(OpContext& ctx, const OutputGradient& dy, Params params,
                                                    const kernels::Epilogue& epilogue) const {
  const auto* recipe = ctx.plan().recipe;
  if (!recipe || saves_originals(*recipe)) {
    const auto& w = backward_weight(ctx, params);
    return kernels::gemm(as_matrix(as_dtype(dy.values.value, w.scalar_type())), w, epilogue);
  }
  const auto q_w =
      saved_matrix(*recipe, recipe->weight, dy.dtype(), local_out_features(), local_in_features(), ctx.saved(kWeight));
  if (dy.quantized) return kernels::quantized_gemm({*dy.quantized}, {q_w, true}, epilogue);
  return kernels::gemm(as_matrix(dy.values.value), kernels::dequantize(q_w, false, q_w.dtype), epilogue);
}

std::optional<QuantizedMatrix> BasicLinear::requantized_input(OpContext& ctx, const OutputGradient& dy,
                                                              const at::Tensor& x) const {
  const auto* recipe = ctx.plan().recipe;
  if (!recipe || saves_originals(*recipe)) return {};
  TORCH_INTERNAL_ASSERT(!recipe->is_delayed());  // the scale of forward is not known any more
  const bool columnwise = dy.quantized.has_value();
  return quantize(recipe->input, as_matrix(x), {.rowwise = !columnwise, .columnwise = columnwise});
}

QuantizedMatrix BasicLinear::saved_copies(OpContext& ctx, const OutputGradient& dy, const SavedInput& saved,
                                          const at::Tensor& gathered) const {
  if (saved.copy) return join_copies(*saved.copy, gathered);
  const auto& recipe = *ctx.plan().recipe;
  return saved_matrix(recipe, recipe.input, dy.dtype(),
                      c10::multiply_integers(dy.sizes.begin(), std::prev(dy.sizes.end())), local_in_features(),
                      gathered);
}

void BasicLinear::weight_gradient_of_copies(OpContext& ctx, const OutputGradient& dy, const QuantizedMatrix& x,
                                            double scale) const {
  if (!dy.quantized)
    return plain_weight_gradient(ctx, dy.values, kernels::dequantize(x, false, x.dtype), scale, nullptr);
  weight_gradient_by(ctx, [q_dy = *dy.quantized, x, scale](const at::Tensor& out, bool accumulate) {
    const auto to = out.defined() ? out.view({q_dy.columns, x.columns}) : out;
    return kernels::quantized_gemm({q_dy, true}, {x, true},
                                   {.scale = scale, .addend = accumulate ? to : at::Tensor(), .out = to})
        .out;
  });
}

}  // namespace weft::ops
