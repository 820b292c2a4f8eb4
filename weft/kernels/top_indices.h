#pragma once
#include <ATen/core/Tensor.h>

namespace weft::kernels {

/// The indices, int64 [rows, k], of the k largest values of each row of a float32 matrix of the CPU, the largest first.
/// Of equal values the one with the lower index comes first; NaN is larger than every number.
at::Tensor top_indices(const at::Tensor& matrix, int64_t k);

}  // namespace weft::kernels
