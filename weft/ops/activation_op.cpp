#include "weft/ops/activation_op.h"

#include <cmath>

#include "weft/ops/leading_dims.h"
#include "weft/quant/quantizer.h"

namespace weft::ops {

namespace {

/// Of the input that `cache_quantized_input` saves.
kernels::Quantization saved_quantization() {
  return quant::Quantizer{.scaling = quant::Scaling::current, .format = Format::e4m3}.quantization();
}

void check_quantizable(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype != at::kDouble, "input is float64, expected float32, float16 or bfloat16 with ",
                   "cache_quantized_input. Convert it, or leave cache_quantized_input false.");
}

at::Tensor quantized_bytes(const at::Tensor& x) {
  return kernels::quantize(x.dim() == 0 ? x.view({1, 1}) : as_matrix(x), saved_quantization(), {}).rowwise.bytes;
}

/// The values of `bytes` for an input of `sizes`.
at::Tensor dequantized(const at::Tensor& bytes, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto columns = sizes.empty() ? 1 : sizes.back();
  const auto rows = c10::multiply_integers(sizes.slice(0, sizes.empty() ? 0 : sizes.size() - 1));
  const auto copy = kernels::matrix_of_copy(saved_quantization(), dtype, rows, columns, /*columnwise=*/false, bytes);
  return kernels::dequantize(copy, /*columnwise=*/false, dtype).view(sizes);
}

}  // namespace

Inferred ActivationOp::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  const auto input = x.as(plan.dtype(x.dtype));
  if (cache_quantized_input_) check_quantizable(input.dtype);
  Inferred out{.y = activation_output(act_, input)};
  out.saved.resize(1);
  if (!plan.needs_input_grad) return out;
  out.saved[kInput] = saved_input(x, input.dtype);
  if (cache_quantized_input_) {
    const auto columns = input.sizes.empty() ? c10::SymInt(1) : input.sizes.back();
    const kernels::CopySizes<c10::SymInt> sizes(saved_quantization(), input.rows(), columns, /*columnwise=*/false);
    out.saved[kInput] = Spec{{sizes.bytes()}, at::kByte};
  }
  return out;
}

at::Tensor ActivationOp::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  auto input = activation_input(act_, x, ctx.dtype(x.scalar_type()));
  if (cache_quantized_input_) check_quantizable(input.scalar_type());
  auto y = kernels::activation_forward(act_, input);
  if (ctx.needs_input_grad()) ctx.save(kInput, cache_quantized_input_ ? quantized_bytes(input) : std::move(input));
  return y;
}

at::Tensor ActivationOp::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (!ctx.needs_input_grad()) return {};
  if (!cache_quantized_input_) return kernels::activation_backward(act_, dy, ctx.saved(kInput));
  auto sizes = dy.sizes().vec();
  if (act_.gated()) sizes.back() *= 2;
  return kernels::activation_backward(act_, dy, dequantized(ctx.saved(kInput), sizes, dy.scalar_type()));
}

/// A gated activation splits the last dimension into halves, and each half into blocks of glu_interleave_size. `Size`
/// is int64_t or c10::SymInt.
template <class Size>
static void check_gated_sizes(const kernels::Act& act, c10::ArrayRef<Size> sizes) {
  TORCH_CHECK_VALUE(!sizes.empty(), "input is a scalar, expected at least 1 dimension.");
  const Size& columns = sizes.back();
  const Size half = columns / 2;
  TORCH_CHECK_VALUE(same_size(columns % 2, 0), "input has ", columns, " columns, expected an even number.");
  TORCH_CHECK_VALUE(act.interleave == 0 || same_size(half % act.interleave, 0), "half of the input has ", half,
                    " columns, expected a multiple of glu_interleave_size ", act.interleave, ".");
}

at::Tensor activation_input(const kernels::Act& act, const at::Tensor& x, at::ScalarType dtype) {
  if (act.gated()) check_gated_sizes(act, x.sizes());
  return as_dtype(x, dtype);
}

Spec activation_output(const kernels::Act& act, const Spec& x) {
  if (!act.gated()) return x;
  check_gated_sizes(act, c10::SymIntArrayRef(x.sizes));
  return x.with_last(x.sizes.back() / 2);
}

void check_positive(std::string_view op, std::string_view argument, double value) {
  TORCH_CHECK_VALUE(std::isfinite(value) && value > 0, op, ": ", argument, " is ", value,
                    ", expected a finite positive number.");
}

int64_t interleave_size(std::string_view op, std::optional<int64_t> given) {
  TORCH_CHECK_VALUE(!given || *given > 0, op, ": glu_interleave_size is ", *given,
                    ", expected a positive integer or none.");
  return given.value_or(0);
}

}  // namespace weft::ops
