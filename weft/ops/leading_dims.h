#pragma once
#include <c10/util/accumulate.h>

#include "weft/kernels/opmath.h"

namespace weft::ops {

/// Makes `view`, created below autograd from `t`, share the version counter of `t` if both use the same storage, so
/// that autograd detects a write into either. Returns `view`.
at::Tensor share_version_counter(at::Tensor view, const at::Tensor& t);
/// [..., n] reshaped to [rows, n]; rows and n may be 0. A view if the strides allow it.
at::Tensor as_matrix(const at::Tensor& t);
/// [rows, n] reshaped to [..., n] with the leading ones of these sizes.
at::Tensor restore_leading_dims(const at::Tensor& matrix, at::IntArrayRef sizes);
inline at::Tensor restore_leading_dims(const at::Tensor& matrix, const at::Tensor& like) {
  return restore_leading_dims(matrix, like.sizes());
}
/// The sum over all dimensions but the last; `t` itself if it has one dimension.
at::Tensor sum_rows(const at::Tensor& t);
/// Whether these sizes, [..., n], have at least `rows` rows. Always true for a tensor without dimensions and for n = 0.
inline bool has_rows(at::IntArrayRef sizes, int64_t rows) {
  return sizes.empty() || c10::multiply_integers(sizes) >= rows * sizes.back();
}
using kernels::as_dtype;

}  // namespace weft::ops
