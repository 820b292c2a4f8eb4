#include <ATen/ops/mul.h>

#include "weft/kernels/precision.h"
#include "weft/kernels/tiers.h"

// Groups one after the other, each by one `gemm` on views.

namespace weft::kernels {
namespace {

at::Tensor rows_of(const at::Tensor& t, const OpenIndex& index, int64_t g) {
  return t.narrow(0, index.begin(g), index.rows(g));
}

}  // namespace

void split_gemm(const OpenIndex& index, const GroupedProduct& call, int64_t g) {
  if (index.rows(g) == 0) return;
  const auto x = rows_of(call.x, index, g), w = call.w.matrix(g), out = rows_of(call.out, index, g);
  const Matrix b(w, call.transposed);
  if (!call.bias.defined()) return static_cast<void>(gemm(x, b, {.out = out}));
  const auto bias = call.bias.matrix(g);
  if (!call.scales.defined()) return static_cast<void>(gemm(x, b, {.bias = bias.view({-1}), .out = out}));
  // s·b first and the product onto it, so that both are rounded together.
  const auto scales = rows_of(call.scales, index, g).reshape({-1, 1}).to(wide(x.scalar_type()));
  const auto sum = at::mul(scales, widen(bias));
  gemm(x, b, {.add = sum, .out = sum});
  out.copy_(sum);
}

void split_weight_gradient(const OpenIndex& index, const GroupedGradient& call, int64_t g) {
  const auto out = call.out.matrix(g);
  if (index.rows(g) == 0) return call.add ? void() : static_cast<void>(out.zero_());
  const auto dy = rows_of(call.dy, index, g);
  Epilogue e{.out = out};
  if (call.add) e.add = out;
  gemm(transposed(dy), rows_of(call.x, index, g), e);
}

}  // namespace weft::kernels
