#include "weft/kernels/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sqrt.h>
#include <gtest/gtest.h>

namespace weft::kernels {
namespace {

TEST(LayerNorm, MatchesFormula) {
  const auto x = at::randn({5, 2, 6}, at::kDouble), gamma = at::randn({2, 6}, at::kDouble),
             beta = at::randn({2, 6}, at::kDouble);
  const auto centered = x - x.mean({1, 2}, true);
  const auto expected = centered / at::sqrt((centered * centered).mean({1, 2}, true) + 0.3) * gamma + beta;
  EXPECT_TRUE(at::allclose(layer_norm_forward(x, gamma, beta, 0.3).y, expected, 1e-12, 1e-12));
  EXPECT_TRUE(at::allclose(layer_norm_forward(x, gamma, {}, 0.3).y, expected - beta, 1e-12, 1e-12));
}

TEST(RmsNorm, MatchesFormula) {
  const auto x = at::randn({5, 2, 6}, at::kDouble), gamma = at::randn({2, 6}, at::kDouble);
  const auto expected = x / at::sqrt((x * x).mean({1, 2}, true) + 0.3) * gamma;
  EXPECT_TRUE(at::allclose(rms_norm_forward(x, gamma, 0.3).y, expected, 1e-12, 1e-12));
}

TEST(L2Norm, MatchesFormula) {
  const auto x = at::randn({5, 6}, at::kDouble);
  EXPECT_TRUE(at::allclose(l2_norm_forward(x, 0.3).y, x / at::sqrt((x * x).sum(-1, true) + 0.3), 1e-12, 1e-12));
}

TEST(Norm, RoundsLowPrecisionOnce) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto x = at::randn({64, 64}).to(dtype), gamma = at::randn({64}), beta = at::randn({64});
    const auto wide = x.to(at::kFloat);
    const auto check = [&](const at::Tensor& got, const at::Tensor& expected) {
      EXPECT_EQ(got.scalar_type(), dtype);
      EXPECT_LE(got.ne(expected.to(dtype)).sum().item<int64_t>(), got.numel() / 500);
    };
    check(layer_norm_forward(x, gamma, beta, 1e-5).y, layer_norm_forward(wide, gamma, beta, 1e-5).y);
    check(rms_norm_forward(x, gamma, 1e-5).y, rms_norm_forward(wide, gamma, 1e-5).y);
    check(l2_norm_forward(x, 1e-6).y, l2_norm_forward(wide, 1e-6).y);
  }
}

TEST(Norm, StatisticsOfLongRowsAreAccurate) {
  const auto x = at::rand({4, 16384}), one = at::ones({16384});
  const auto got = rms_norm_forward(x, one, 0).rstd.to(at::kDouble);
  EXPECT_TRUE(at::allclose(got, rms_norm_forward(x.to(at::kDouble), one.to(at::kDouble), 0).rstd, 1.3e-6, 0));
}

TEST(Norm, SupportsEmptyRows) {
  const auto x = at::rand({3, 0}), gamma = at::rand({0});
  const auto layer = layer_norm_forward(x, gamma, gamma, 1e-5);
  EXPECT_EQ(layer_norm_backward(x, x, layer.mean, layer.rstd, gamma, {true, true, true}).dx.sizes(), x.sizes());
  const auto rms = rms_norm_forward(x, gamma, 1e-5);
  EXPECT_EQ(rms_norm_backward(x, x, rms.rstd, gamma, {true, true}).dgamma.sizes(), gamma.sizes());
  EXPECT_EQ(l2_norm_backward(x, x, l2_norm_forward(x, 1e-6).rnorm).sizes(), x.sizes());
}

TEST(RmsNorm, TinyInputsWithoutEpsGiveFiniteGradients) {
  const auto x = at::randn({4, 8}) * 1e-15, gamma = at::ones({8}), dy = at::randn({4, 8});
  const auto out = rms_norm_backward(dy, x, rms_norm_forward(x, gamma, 0).rstd, gamma, {true, true});
  EXPECT_TRUE(out.dx.isfinite().all().item<bool>()) << out.dx;
}

}  // namespace
}  // namespace weft::kernels
