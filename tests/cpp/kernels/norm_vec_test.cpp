#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/rsqrt.h>

#include "tests/cpp/kernels/compare.h"
#include "weft/kernels/norm.h"
#include "weft/kernels/rows.h"

namespace weft::kernels {
namespace {

/// A norm in differentiable ATen operations.
at::Tensor plain(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, bool centered) {
  const auto centered_x = centered ? x - x.mean(-1, true) : x;
  auto y = centered_x * at::rsqrt((centered_x * centered_x).mean(-1, true) + 0.3) * gamma;
  return beta.defined() ? y + beta : y;
}

struct Truth {
  at::Tensor y, dx, dgamma, dbeta;
};
Truth truth(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, const at::Tensor& dy,
            const at::Tensor& add) {
  const auto leaf = exact(x).detach().requires_grad_(true), g = exact(gamma).detach().requires_grad_(true);
  const auto b = beta.defined() ? exact(beta).detach().requires_grad_(true) : at::Tensor{};
  const auto y = plain(leaf, g, b, beta.defined());
  y.backward(exact(dy));
  return {y.detach(), add.defined() ? leaf.grad() + exact(add) : leaf.grad(), g.grad(), b.defined() ? b.grad() : b};
}

void check_layer_norm(const at::Tensor& x, const at::Tensor& add) {
  const auto n = x.size(-1);
  const auto gamma = at::randn({n}), beta = at::randn({n});
  const auto out = layer_norm_forward(x, gamma, beta, 0.3);
  const auto dy = values(x.sizes(), x.scalar_type());
  const auto expected = truth(x, gamma, beta, dy, add);
  expect_near(out.y, expected.y, 10);
  const auto got = layer_norm_backward(dy, x, out.mean, out.rstd, gamma, {true, true, true}, add);
  expect_near(got.dx, expected.dx, 20);
  expect_near(got.dgamma, expected.dgamma, 50);
  expect_near(got.dbeta, expected.dbeta, 50);
  const auto alone = layer_norm_backward(dy, x, out.mean, out.rstd, gamma, {false, false, true}, add);
  EXPECT_FALSE(alone.dx.defined() || alone.dgamma.defined());
  EXPECT_TRUE(at::allclose(alone.dbeta, got.dbeta));
  EXPECT_TRUE(at::equal(layer_norm_forward(x, gamma, beta, 0.3, /*keep=*/false).y, out.y));
  const auto without_beta = layer_norm_forward(x, gamma, {}, 0.3);
  expect_near(without_beta.y, expected.y - exact(beta), 10);
  EXPECT_TRUE(at::equal(without_beta.mean, out.mean) && at::equal(without_beta.rstd, out.rstd));
  const auto ours = dy.clone();
  const auto reused = layer_norm_backward(ours, x, out.mean, out.rstd, gamma, {true, true, true}, add, /*reuse=*/true);
  EXPECT_TRUE(at::equal(reused.dx, got.dx) && at::equal(reused.dgamma, got.dgamma));
}

void check_rms_norm(const at::Tensor& x, const at::Tensor& add) {
  const auto gamma = at::randn({x.size(-1)});
  const auto out = rms_norm_forward(x, gamma, 0.3);
  const auto dy = values(x.sizes(), x.scalar_type());
  const auto expected = truth(x, gamma, {}, dy, add);
  expect_near(out.y, expected.y, 10);
  const auto got = rms_norm_backward(dy, x, out.rstd, gamma, {true, true}, add);
  expect_near(got.dx, expected.dx, 20);
  expect_near(got.dgamma, expected.dgamma, 50);
  expect_near(rms_norm_backward(dy, x, out.rstd, gamma, {true, false}, add).dx, expected.dx, 20);
  EXPECT_TRUE(at::equal(rms_norm_forward(x, gamma, 0.3, /*keep=*/false).y, out.y));
  const auto ours = dy.clone();
  const auto reused = rms_norm_backward(ours, x, out.rstd, gamma, {true, true}, add, /*reuse=*/true);
  EXPECT_TRUE(at::equal(reused.dx, got.dx) && at::equal(reused.dgamma, got.dgamma));
}

void check_l2_norm(const at::Tensor& x, const at::Tensor& add) {
  const auto out = l2_norm_forward(x, 0.3);
  const auto dy = values(x.sizes(), x.scalar_type());
  const auto expected = l2_norm_forward(exact(x), 0.3);
  expect_near(out.y, expected.y, 10);
  expect_near(l2_norm_backward(dy, x, out.rnorm, add),
              l2_norm_backward(exact(dy), exact(x), expected.rnorm, exact(add)), 20);
}

TEST(KernelsNorm, MatchesFloat64ForEveryDtypeAndSize) {
  for (const auto dtype : kVectorDtypes)
    for (const auto width : kOddSizes)
      for (const int64_t rows : {0, 1, 5}) {
        if (width == 0) continue;
        SCOPED_TRACE(testing::Message() << dtype << " " << rows << "x" << width);
        for (const bool gaps : {false, true}) {
          const auto x = values({rows, width}, dtype, gaps);
          for (const auto& add : {at::Tensor{}, values({rows, width}, dtype, gaps), at::randn({rows, width})}) {
            check_layer_norm(x, add);
            check_rms_norm(x, add);
            check_l2_norm(x, add);
          }
        }
      }
}

TEST(KernelsNorm, SumsRowsInFixedOrder) {
  const auto x = values({900, 600}, at::kBFloat16), dy = values({900, 600}, at::kBFloat16), gamma = at::randn({600});
  const auto rstd = rms_norm_forward(x, gamma, 1e-5).rstd;
  const auto got = rms_norm_backward(dy, x, rstd, gamma, {true, true});
  const auto expected = rms_norm_backward(exact(dy), exact(x), exact(rstd), exact(gamma), {true, true});
  expect_near(got.dgamma, expected.dgamma, 500);
  EXPECT_TRUE(at::equal(got.dgamma, rms_norm_backward(dy, x, rstd, gamma, {true, true}).dgamma));
}

TEST(KernelsRows, SumRowsMatchesFloat64) {
  for (const auto dtype : kVectorDtypes)
    for (const auto width : kOddSizes)
      for (const int64_t rows : {0, 1, 3, 4, 9, 1000}) {
        SCOPED_TRACE(testing::Message() << dtype << " " << rows << "x" << width);
        for (const bool gaps : {false, true}) {
          const auto x = values({rows, width}, dtype, gaps);
          expect_near(sum_rows(x), exact(x).sum(0), 1000);
        }
      }
}

TEST(KernelsRows, ScaledMaskAddMatchesFloat64) {
  for (const auto dtype : kVectorDtypes)
    for (const auto width : kOddSizes) {
      const auto x = values({3, width}, dtype, true), mask = at::rand({3, width}) > 0.4;
      for (const auto& add : {at::Tensor{}, values({3, width}, dtype), at::randn({3, width})}) {
        auto expected = exact(x) * mask * 1.25;
        if (add.defined()) expected = expected + exact(add);
        expect_near(scaled_mask_add(x, mask, 1.25, add), expected, 5);
      }
    }
}

}  // namespace
}  // namespace weft::kernels
