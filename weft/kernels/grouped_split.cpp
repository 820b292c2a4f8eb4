#include <ATen/ops/mul.h>

#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

// The split path: one `gemm` per group, on views.

namespace weft::kernels {
namespace {

at::Tensor rows_of(const at::Tensor& t, const GroupOffsets& offsets, int64_t g) {
  return t.narrow(0, offsets.begin(g), offsets.rows(g));
}

}  // namespace

void split_gemm(const GroupOffsets& offsets, const GroupedGemmCall& call, int64_t g) {
  if (offsets.rows(g) == 0) return;
  const auto x = rows_of(call.x, offsets, g), w = call.w.matrix(g), out = rows_of(call.out, offsets, g);
  const Matrix b(w, call.transposed);
  if (!call.bias.defined()) return static_cast<void>(gemm(x, b, {.out = out}));
  const auto bias = call.bias.matrix(g);
  if (!call.scales.defined()) return static_cast<void>(gemm(x, b, {.bias = bias.view({-1}), .out = out}));
  // Accumulate the GEMM onto s·b, so that the sum is rounded once.
  const auto scales = rows_of(call.scales, offsets, g).reshape({-1, 1}).to(at::toOpMathType(x.scalar_type()));
  const auto sum = at::mul(scales, to_opmath(bias));
  gemm(x, b, {.addend = sum, .out = sum});
  out.copy_(sum);
}

void split_wgrad(const GroupOffsets& offsets, const GroupedWgradCall& call, int64_t g) {
  const auto out = call.out.matrix(g);
  if (offsets.rows(g) == 0) return call.accumulate ? void() : static_cast<void>(out.zero_());
  const auto dy = rows_of(call.dy, offsets, g);
  Epilogue e{.out = out};
  if (call.accumulate) e.addend = out;
  gemm(transposed(dy), rows_of(call.x, offsets, g), e);
}

}  // namespace weft::kernels
