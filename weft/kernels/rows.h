#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace weft::kernels {

/// Σ_rows of a matrix [rows, n], added up in float32 (float64 for float64) and rounded once to its dtype. In the
/// vector tiers the same for any number of threads.
at::Tensor sum_rows(const at::Tensor& matrix);

/// `t`, of any shape, rounded to `dtype`; t itself if it has it.
at::Tensor rounded(const at::Tensor& t, at::ScalarType dtype);

/// x·mask·scale + addend, rounded once to x's dtype. `mask` is boolean and has the shape of x; so has `addend`, which
/// may be undefined.
at::Tensor scaled_mask_add(const at::Tensor& x, const at::Tensor& mask, double scale, const at::Tensor& addend = {});

/// out = Σ terms of matrices of one shape, added up in their order in float32 (float64 for float64) and rounded once.
/// `out` may be one of the terms.
void sum_terms(const std::vector<at::Tensor>& terms, const at::Tensor& out);

}  // namespace weft::kernels
