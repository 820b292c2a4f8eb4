#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace weft::kernels {

/// Sums a matrix [rows, n] over its rows in float32 (float64 for float64) and rounds once to its dtype. In the vector
/// tiers the result is bitwise the same for any number of threads.
at::Tensor sum_rows(const at::Tensor& matrix);

/// `t` rounded to `dtype`; `t` itself if it already has that dtype.
at::Tensor rounded(const at::Tensor& t, at::ScalarType dtype);

/// x·mask·scale + addend, rounded once to x's dtype. `mask` is boolean; mask and addend have the shape of x. `addend`
/// may be undefined.
at::Tensor scaled_mask_add(const at::Tensor& x, const at::Tensor& mask, double scale, const at::Tensor& addend = {});

/// out = Σ terms, matrices of the same shape, added in order in float32 (float64 for float64) and rounded once. `out`
/// may be one of the terms.
void sum_terms(const std::vector<at::Tensor>& terms, const at::Tensor& out);

}  // namespace weft::kernels
