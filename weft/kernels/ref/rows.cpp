#include "weft/kernels/rows.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include "weft/kernels/precision.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::ref {

at::Tensor sum_rows(const at::Tensor& matrix) { return at::sum(matrix, 0); }

at::Tensor scaled_mask_add(const at::Tensor& x, const at::Tensor& mask, double scale, const at::Tensor& add) {
  if (!add.defined()) return at::mul(at::mul(x, mask), scale);  // mul_ would round the scale
  return round_to(at::mul(widen(x), mask).mul_(scale).add_(add), x.scalar_type());
}

}  // namespace weft::kernels::ref
