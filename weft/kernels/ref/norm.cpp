#include "weft/kernels/norm.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/sum.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::ref {
namespace {

at::Tensor meta_statistic(const at::Tensor& x, const at::Tensor& gamma) {
  auto sizes = x.sizes().vec();
  std::fill(sizes.end() - gamma.dim(), sizes.end(), 1);
  return at::empty(sizes, x.options().dtype(at::toOpMathType(x.scalar_type())));
}

/// Reshapes [..., row] to [rows, N]; either may be 0.
at::Tensor as_rows(const at::Tensor& t, const at::Tensor& gamma) {
  return t.reshape({c10::multiply_integers(t.sizes().slice(0, t.dim() - gamma.dim())), gamma.numel()});
}

/// dx + addend in the dtype of x. Modifies `dx` in place.
at::Tensor finish(const at::Tensor& dx, const at::Tensor& addend, const at::Tensor& x) {
  if (addend.defined()) dx.add_(addend);
  return as_dtype(dx, x.scalar_type());
}

}  // namespace

LayerNormForward layer_norm_forward(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, double eps) {
  if (x.is_meta()) return {at::empty_like(x), meta_statistic(x, gamma), meta_statistic(x, gamma)};
  auto [y, mean, rstd] = at::native_layer_norm(x, gamma.sizes(), gamma, beta, eps);
  return {std::move(y), std::move(mean), std::move(rstd)};
}

NormGrads layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean, const at::Tensor& rstd,
                              const at::Tensor& gamma, std::array<bool, 3> output_mask, const at::Tensor& addend) {
  if (x.is_meta()) {
    const auto like = [](const at::Tensor& t, bool given) { return given ? at::empty_like(t) : at::Tensor{}; };
    return {like(x, output_mask[0]), like(gamma, output_mask[1]), like(gamma, output_mask[2])};
  }
  // ATen sums dγ and dβ in the dtype of its inputs. It only checks whether β is defined, so γ stands in for it.
  const auto dtype = output_mask[1] || output_mask[2] || addend.defined() ? gamma.scalar_type() : x.scalar_type();
  auto [dx, dgamma, dbeta] = at::native_layer_norm_backward(as_dtype(dy, dtype), as_dtype(x, dtype), gamma.sizes(),
                                                            mean, rstd, gamma, gamma, output_mask);
  return {dx.defined() ? finish(dx, addend, x) : dx, std::move(dgamma), std::move(dbeta)};
}

RmsNormForward rms_norm_forward(const at::Tensor& x, const at::Tensor& gamma, double eps) {
  const auto values = to_opmath(x);
  std::vector<int64_t> row(gamma.dim());
  for (int64_t i = 0; i < gamma.dim(); ++i) row[i] = i - gamma.dim();
  const auto n = static_cast<double>(std::max<int64_t>(gamma.numel(), 1));
  auto rstd = at::linalg_vector_norm(values, 2, row, /*keepdim=*/true);
  rstd.mul_(rstd).div_(n).add_(eps).rsqrt_();
  auto y = at::mul(values, rstd).mul_(gamma);
  return {as_dtype(y, x.scalar_type()), std::move(rstd)};
}

NormGrads rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd, const at::Tensor& gamma,
                            std::array<bool, 2> output_mask, const at::Tensor& addend) {
  const auto values = as_rows(to_opmath(x), gamma), grad = as_rows(as_dtype(dy, gamma.scalar_type()), gamma);
  const auto g = gamma.reshape(-1), r = rstd.reshape(-1);
  const auto product = at::mul(grad, values);
  NormGrads out;
  if (output_mask[1]) out.dgamma = at::mv(product.t(), r).view(gamma.sizes());
  if (!output_mask[0]) return out;
  const auto projection = at::mv(product, g).mul_(r).mul_(r).mul_(r).unsqueeze_(1);  // rstd³ alone may overflow
  const auto n = static_cast<double>(std::max<int64_t>(gamma.numel(), 1));
  auto dx = at::mul(grad, g).mul_(r.unsqueeze(1)).addcmul_(values, projection, -1 / n);
  out.dx = finish(dx.view(x.sizes()), addend, x);
  return out;
}

L2NormForward l2_norm_forward(const at::Tensor& x, double eps) {
  const auto values = to_opmath(x);
  auto rnorm = at::linalg_vector_norm(values, 2, at::IntArrayRef{-1}, /*keepdim=*/true);
  rnorm.mul_(rnorm).add_(eps).rsqrt_();
  return {as_dtype(at::mul(values, rnorm), x.scalar_type()), std::move(rnorm)};
}

at::Tensor l2_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rnorm,
                            const at::Tensor& addend) {
  const auto values = to_opmath(x), grad = as_dtype(dy, rnorm.scalar_type());
  const auto projection = at::sum(at::mul(values, grad), -1, /*keepdim=*/true).mul_(rnorm).mul_(rnorm).mul_(rnorm);
  return finish(at::mul(grad, rnorm).addcmul_(values, projection, -1), addend, x);
}

}  // namespace weft::kernels::ref
