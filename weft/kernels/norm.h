#pragma once
#include <ATen/core/Tensor.h>

#include <array>

namespace weft::kernels {

// A row is the N elements of the trailing gamma.dim() dimensions. Statistics are float32 (float64 for float64) and have
// the sizes of x with those of the row replaced by 1. y and dx are rounded once, to the dtype of x. gamma, beta and
// their gradients have the dtype of the statistics. Gradients that are not needed stay undefined.

struct LayerNormForward {
  at::Tensor y, mean, rstd;
};
/// y = (x - mean)·rstd·γ + β,  rstd = 1/√(var(x) + eps). An undefined β is 0.
/// Without `keep` the statistics may stay undefined. The same holds for rms_norm_forward.
LayerNormForward layer_norm_forward(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, double eps,
                                    bool keep = true);

struct NormGrads {
  at::Tensor dx, dgamma, dbeta;
};
/// x̂ = (x - mean)·rstd, g = dy·γ:  dx = rstd·(g - mean(g) - x̂·mean(g·x̂));  dγ = Σ_rows dy·x̂;  dβ = Σ_rows dy.
/// `output_mask`: dx, dγ, dβ. `addend` has the shape of x and is added to dx before rounding. With `reuse`, dx may
/// overwrite dy. The same holds for rms_norm_backward.
NormGrads layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean, const at::Tensor& rstd,
                              const at::Tensor& gamma, std::array<bool, 3> output_mask, const at::Tensor& addend = {},
                              bool reuse = false);

struct RmsNormForward {
  at::Tensor y, rstd;
};
/// y = x·rstd·γ,  rstd = 1/√(mean(x²) + eps).
RmsNormForward rms_norm_forward(const at::Tensor& x, const at::Tensor& gamma, double eps, bool keep = true);
/// dx = rstd·γ·dy - x·rstd³·Σ_row(dy·γ·x)/N;  dγ = Σ_rows dy·x·rstd.  `output_mask`: dx, dγ.
NormGrads rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd, const at::Tensor& gamma,
                            std::array<bool, 2> output_mask, const at::Tensor& addend = {}, bool reuse = false);

struct L2NormForward {
  at::Tensor y, rnorm;
};
/// y = x·q,  q = 1/√(Σ x² + eps) over the last dimension.
L2NormForward l2_norm_forward(const at::Tensor& x, double eps);
/// dx = q·dy - x·q³·Σ(x·dy).
at::Tensor l2_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rnorm,
                            const at::Tensor& addend = {});

}  // namespace weft::kernels
