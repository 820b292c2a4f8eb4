#pragma once
#include "weft/kernels/opmath.h"

namespace weft::ops {

/// `view`, made below autograd from `t` or a copy of it, counting versions with `t` if it shares the memory: a write
/// into either is seen by whoever saved the other.
at::Tensor share_version_counter(at::Tensor view, const at::Tensor& t);
/// [..., n] as [rows, n], also with 0 rows or n = 0. A view if the strides allow it.
at::Tensor as_matrix(const at::Tensor& t);
/// [rows, n] with the leading sizes of `like`.
at::Tensor restore_leading_dims(const at::Tensor& matrix, const at::Tensor& like);
/// Sum over all dimensions but the last; `t` itself if it has only one.
at::Tensor sum_rows(const at::Tensor& t);
using kernels::as_dtype;

}  // namespace weft::ops
