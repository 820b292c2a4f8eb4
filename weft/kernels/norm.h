#pragma once
#include <ATen/core/Tensor.h>

#include <array>

namespace weft::kernels {

// A row is the N values in as many trailing dimensions as `gamma` has. Statistics are computed and kept in float32
// (float64 for float64) with the sizes of x, those of the row replaced by 1; y and dx are rounded once to x's dtype.
// `gamma` and `beta` come in the statistics' dtype, and so do their gradients. Gradients not wanted stay undefined.

struct LayerNormForward {
  at::Tensor y, mean, rstd;
};
/// y = (x - mean)·rstd·γ + β,  rstd = 1/√(var(x) + eps).  Without `keep` the statistics may stay undefined; so below.
LayerNormForward layer_norm_forward(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, double eps,
                                    bool keep = true);

struct NormGrads {
  at::Tensor dx, dgamma, dbeta;
};
/// x̂ = (x - mean)·rstd, g = dy·γ:  dx = rstd·(g - mean(g) - x̂·mean(g·x̂));  dγ = Σ_rows dy·x̂;  dβ = Σ_rows dy.
/// `output_mask`: dx, dγ, dβ. `addend` has the shape of x and is added to dx before it is rounded. With `reuse` the
/// memory of dy may become that of dx. So below.
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
