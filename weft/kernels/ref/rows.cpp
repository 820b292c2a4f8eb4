#include "weft/kernels/rows.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::ref {

at::Tensor sum_rows(const at::Tensor& matrix) { return at::sum(matrix, 0); }

at::Tensor scaled_mask_add(const at::Tensor& x, const at::Tensor& mask, double scale, const at::Tensor& addend) {
  if (!addend.defined()) return at::mul(at::mul(x, mask), scale);  // mul_ would round the scale
  return as_dtype(at::mul(to_opmath(x), mask).mul_(scale).add_(addend), x.scalar_type());
}

void sum_terms(const std::vector<at::Tensor>& terms, const at::Tensor& out) {
  auto sum = at::zeros(out.sizes(), out.options().dtype(at::toOpMathType(out.scalar_type())));
  for (const auto& t : terms) sum.add_(t);
  out.copy_(sum);
}

}  // namespace weft::kernels::ref
