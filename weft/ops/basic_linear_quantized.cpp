#include "weft/kernels/launch.h"
#include "weft/kernels/quantized_gemm.h"
#include "weft/ops/basic_linear.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/wgrad_sink.h"
#include "weft/quant/delayed_scaling.h"

// A linear whose operands a recipe quantizes, Q(t):
//   y = Q(x) Q(W)ᵀ;  dx = Q(dy) Q(W);  dW = Σ_rows Q(dy)ᵀ Q(x)
// Forward saves the columnwise copies of x and W. With a backward override it saves x and W themselves, or their
// rowwise copies, and backward multiplies dy by what these hold.

namespace weft::ops {
namespace {

using kernels::QuantizedMatrix;
using quant::BackwardOverride;
using quant::Quantizer;

bool quantizes_backward(const quant::Recipe& recipe) { return !recipe.backward_override; }
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

  /// Quantizes with the scale of the state, and records the maximum magnitude there.
  QuantizedMatrix quantize(const Quantizer& quantizer, const at::Tensor& matrix, kernels::QuantizeArgs args) const {
    if (!state.defined()) return ops::quantize(quantizer, matrix, args);
    args.scale = quant::delayed_scale(state, index);
    auto q = ops::quantize(quantizer, matrix, args);
    quant::record_amax(state, index, (q.rowwise.defined() ? q.rowwise : q.columnwise).amax);
    return q;
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

/// The copy that backward reads, as one tensor.
const at::Tensor& saved_bytes(const quant::Recipe& recipe, const QuantizedMatrix& q) {
  return (quantizes_backward(recipe) ? q.columnwise : q.rowwise).bytes;
}

/// What `saved_bytes` returned, as a matrix again.
QuantizedMatrix saved_matrix(const quant::Recipe& recipe, const Quantizer& quantizer, at::ScalarType dtype,
                             int64_t rows, int64_t columns, const at::Tensor& bytes) {
  return kernels::matrix_of_copy(quantizer.quantization(), dtype, rows, columns, quantizes_backward(recipe), bytes);
}

Spec saved_spec(const quant::Recipe& recipe, const Quantizer& quantizer, const Spec& matrix) {
  const kernels::CopySizes<c10::SymInt> sizes(quantizer.quantization(), matrix.rows(), matrix.sizes.back(),
                                              quantizes_backward(recipe));
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
        originals || quantizes_again(recipe) ? saved_input(x, dtype) : SavedSpec(saved_spec(recipe, recipe.input, x));
  if (plan.needs_input_grad && !originals) out.saved[kWeight] = saved_spec(recipe, recipe.weight, weight);
  if (plan.needs_input_grad && originals && weight.dtype != dtype) out.saved[kWeight] = weight.as(dtype);
  if (plan.needs_grad) out.saved[kRecipe] = saved_recipe_spec(recipe);
}

kernels::GemmResult BasicLinear::quantized_gemm(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                                const kernels::Epilogue& epilogue) const {
  check_input(x, weight);
  TORCH_CHECK_NOT_IMPLEMENTED(!kernels::launch_hook(), "recorded launches of quantized linears are not supported.");
  const auto& recipe = *ctx.plan().recipe;
  const bool originals = saves_originals(recipe), needs_dw = ctx.needs_param_grad(0), needs_dx = ctx.needs_input_grad();
  const auto dtype = ctx.dtype(weight.scalar_type());
  const auto local = as_dtype(x, dtype), w = as_dtype(weight, dtype), all = gather_input(local).wait();
  const bool saves_copy_of_x = needs_dw && !originals && !quantizes_again(recipe);
  const auto q_x =
      delayed_tensor(ctx, &Buffers::forward_scaling, 0)
          .quantize(recipe.input, as_matrix(all), {.columnwise = saves_copy_of_x && quantizes_backward(recipe)});
  const auto q_w = delayed_tensor(ctx, &Buffers::forward_scaling, 1)
                       .quantize(recipe.weight, w, {.columnwise = needs_dx && quantizes_backward(recipe)});
  if (needs_dw && recipe.input.random_hadamard_transform && quantizes_backward(recipe))
    kernels::check_hadamard(as_matrix(all));
  if (needs_dw) ctx.save(kInput, saves_copy_of_x ? saved_bytes(recipe, q_x) : local);
  if (needs_dx && !originals) ctx.save(kWeight, saved_bytes(recipe, q_w));
  if (needs_dx && originals && !w.is_same(weight)) ctx.save(kWeight, w);
  if (ctx.needs_grad()) ctx.save(kRecipe, save_recipe(recipe));
  kernels::GemmResult result;
  result.out = restore_leading_dims(kernels::quantized_gemm({q_x}, {q_w}, epilogue), all);
  return result;
}

at::Tensor BasicLinear::quantized_backward(OpContext& ctx, const at::Tensor& dy, Params params) const {
  if (!ctx.needs_grad()) return {};
  const auto& recipe = *ctx.plan().recipe;
  const auto dtype = ctx.dtype((params[0].defined() ? params[0] : dy).scalar_type());  // W is kept for dx only
  auto gathering_x =
      quantizes_again(recipe) || saves_originals(recipe) ? gather_saved_input(ctx) : comm::Work(ctx.saved(kInput));
  const auto dy_all = as_dtype(gather_output_gradient(dy).wait(), dtype);
  std::optional<QuantizedMatrix> q_dy;
  if (quantizes_backward(recipe))
    q_dy = delayed_tensor(ctx, &Buffers::backward_scaling, 0)
               .quantize(recipe.grad_output, as_matrix(dy_all),
                         {.rowwise = ctx.needs_input_grad(),
                          .columnwise = ctx.needs_param_grad(0),
                          .random = {.seed = seed_of(ctx.saved(kRecipe))}});
  auto reducing_dx = reduce_input_gradient(quantized_input_gradient(ctx, dy_all, q_dy, params));
  if (ctx.needs_param_grad(0)) quantized_weight_gradient(ctx, dy_all, q_dy, gathering_x.wait());
  return reducing_dx.wait();
}

at::Tensor BasicLinear::quantized_input_gradient(OpContext& ctx, const at::Tensor& dy,
                                                 const std::optional<QuantizedMatrix>& q_dy, Params params) const {
  if (!ctx.needs_input_grad()) return {};
  const auto& recipe = *ctx.plan().recipe;
  if (saves_originals(recipe)) return local_input_gradient(ctx, dy, params, {}).out;
  const auto q_w = saved_matrix(recipe, recipe.weight, dy.scalar_type(), local_out_features(), local_in_features(),
                                ctx.saved(kWeight));
  const auto dx = q_dy ? kernels::quantized_gemm({*q_dy}, {q_w, true}, {})
                       : kernels::gemm(as_matrix(dy), kernels::dequantize(q_w, false, q_w.dtype)).out;
  return restore_leading_dims(dx, dy);
}

void BasicLinear::quantized_weight_gradient(OpContext& ctx, const at::Tensor& dy,
                                            const std::optional<QuantizedMatrix>& q_dy, const at::Tensor& x) const {
  const auto& recipe = *ctx.plan().recipe;
  if (saves_originals(recipe)) return weight_gradient_of(ctx, dy, x);
  const auto rows = as_matrix(dy).size(0);
  const auto q_x = gathers_input()
                       ? quantize(recipe.input, as_matrix(x), {.rowwise = !q_dy, .columnwise = q_dy.has_value()})
                       : saved_matrix(recipe, recipe.input, dy.scalar_type(), rows, local_in_features(), x);
  if (!q_dy) return weight_gradient_of(ctx, dy, kernels::dequantize(q_x, false, q_x.dtype));
  weight_gradient_by(ctx, [q_dy = *q_dy, q_x](const at::Tensor& out, bool accumulate) {
    const auto to = out.defined() ? out.view({q_dy.columns, q_x.columns}) : out;
    return kernels::quantized_gemm({q_dy, true}, {q_x, true}, {.addend = accumulate ? to : at::Tensor(), .out = to});
  });
}

}  // namespace weft::ops
