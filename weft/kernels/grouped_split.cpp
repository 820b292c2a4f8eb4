#include <ATen/ops/mul.h>

#include "weft/kernels/opmath.h"
#include "weft/kernels/quantized_gemm.h"
#include "weft/kernels/tiers.h"

// The split path: one `gemm`, or one `quantized_gemm`, per group, on views.

namespace weft::kernels {
namespace {

at::Tensor rows_of(const at::Tensor& t, const GroupOffsets& offsets, int64_t g) {
  return t.narrow(0, offsets.begin(g), offsets.rows(g));
}

QuantizedMatrix quantize_group(const at::Tensor& t, const Quantization& how, bool columnwise,
                               const at::Tensor& seed = {}, int64_t g = 0) {
  RandomStream random{.offset = static_cast<uint64_t>(g)};
  if (seed.defined()) random.seed = static_cast<uint64_t>(seed.item<int64_t>());
  return quantize(t, how, {.rowwise = !columnwise, .columnwise = columnwise, .random = random});
}

/// The values of the rowwise copy of t.
at::Tensor rounded_by(const Quantization& how, const at::Tensor& t) {
  return dequantize(quantize_group(t, how, false), false, t.scalar_type());
}

/// x Wᵀ or x W of group g.
void multiply(const GroupedGemmCall& call, int64_t g, const at::Tensor& x, const Epilogue& e) {
  const auto w = call.w.matrix(g);
  if (!call.quantization) return static_cast<void>(gemm(x, Matrix(w, call.transposed), e));
  const auto& how = *call.quantization;
  if (!how.a) return static_cast<void>(gemm(x, Matrix(rounded_by(how.b, w), call.transposed), e));
  if (how.checks_hadamard && how.a->hadamard) check_hadamard(x);
  quantized_gemm({quantize_group(x, *how.a, false, how.seed, g)},
                 {quantize_group(w, how.b, !call.transposed), !call.transposed}, e);
}

}  // namespace

void split_gemm(const GroupOffsets& offsets, const GroupedGemmCall& call, int64_t g) {
  if (offsets.rows(g) == 0) return;
  const auto x = rows_of(call.x, offsets, g), out = rows_of(call.out, offsets, g);
  if (!call.bias.defined()) return multiply(call, g, x, {.out = out});
  const auto bias = call.bias.matrix(g);
  if (!call.scales.defined()) return multiply(call, g, x, {.bias = bias.view({-1}), .out = out});
  // Accumulate the GEMM onto s·b, so that the sum is rounded once.
  const auto scales = rows_of(call.scales, offsets, g).reshape({-1, 1}).to(at::toOpMathType(x.scalar_type()));
  const auto sum = at::mul(scales, to_opmath(bias));
  multiply(call, g, x, {.addend = sum, .out = sum});
  out.copy_(sum);
}

void split_wgrad(const GroupOffsets& offsets, const GroupedWgradCall& call, int64_t g) {
  const auto out = call.out.matrix(g);
  if (offsets.rows(g) == 0) return call.accumulate ? void() : static_cast<void>(out.zero_());
  const auto dy = rows_of(call.dy, offsets, g), x = rows_of(call.x, offsets, g);
  Epilogue e{.out = out};
  if (call.accumulate) e.addend = out;
  if (!call.quantization) return static_cast<void>(gemm(transposed(dy), x, e));
  const auto& how = *call.quantization;
  if (!how.a) return static_cast<void>(gemm(transposed(dy), rounded_by(how.b, x), e));
  quantized_gemm({quantize_group(dy, *how.a, true, how.seed, g), true}, {quantize_group(x, how.b, true), true}, e);
}

}  // namespace weft::kernels
