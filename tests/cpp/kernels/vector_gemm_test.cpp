#include <ATen/ops/equal.h>

#include <array>

#include "tests/cpp/kernels/compare.h"
#include "tests/cpp/kernels/gemm_bound.h"
#include "weft/kernels/gemm.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

Tier tier() { return vector_tier(c10::DeviceType::CPU, at::kFloat); }

void check(const at::Tensor& a, const at::Tensor& b, const Epilogue& e) {
  const BoundedGemm want(tier(), a, b, e);
  const auto got = vector_gemm(tier(), a, b, e);
  expect_within(got, want, "");
  if (e.out.defined()) {
    EXPECT_TRUE(got.out.is_same(e.out));
  }
}

/// Sizes below and above the limits of gemm_is_small, and each dimension empty.
const std::vector<std::array<int64_t, 3>> kShapes{{0, 4, 4},   {3, 0, 4},    {3, 4, 0},     {1, 1, 1},    {8, 8, 8},
                                                  {5, 34, 7},  {70, 130, 9}, {33, 100, 50}, {1, 64, 700}, {64, 64, 8},
                                                  {64, 66, 8}, {65, 64, 8},  {33, 34, 1200}};

class KernelsVectorGemm : public testing::Test {
 protected:
  void SetUp() override {
    if (tier() == Tier::ref) GTEST_SKIP() << "no vector tier";
  }
};

TEST_F(KernelsVectorGemm, SupportsBiasScaleAddendAndOutputDtype) {
  for (const auto dtype : kVectorDtypes)
    for (const auto& [m, n, k] : kShapes) {
      SCOPED_TRACE(testing::Message() << dtype << " " << m << "," << n << "," << k);
      const auto a = values({m, k}, dtype), b = values({n, k}, dtype).t();
      check(a, b, {});
      check(a, b, {.scale = 0.5});
      check(a, b, {.bias = values({n}, dtype), .keep_pre_act = true});
      check(a, b,
            {.scale = 2, .bias = at::randn({n}), .keep_column_sums = true, .addend = values({m, n}, dtype, true)});
      for (const auto to : kVectorDtypes) check(a, b, {.addend = at::randn({m, n}), .dtype = to});
    }
}

TEST_F(KernelsVectorGemm, SupportsEveryActivation) {
  for (const auto& act : every_act())
    for (const auto dtype : kVectorDtypes)
      for (const auto& [m, n, k] : kShapes) {
        if (act.gated() && n % 2) continue;
        SCOPED_TRACE(testing::Message() << int(act.kind) << " " << dtype << " " << m << "," << n << "," << k);
        const auto a = values({m, k}, dtype) / 4, b = values({k, n}, dtype) / 4;
        check(a, b, {.bias = values({n}, dtype), .act = act, .keep_pre_act = true});
        check(a, b, {.act = act, .dtype = at::kFloat});
        const auto act_input = values({m, act.gated() ? 2 * n : n}, dtype, true);
        check(a, b, {.act_grad = act, .act_input = act_input});
        check(
            a, b,
            {.scale = 0.5, .act_grad = act, .act_input = act_input, .keep_act_output = true, .keep_column_sums = true});
      }
}

TEST_F(KernelsVectorGemm, SupportsInterleavedGate) {
  Act act{.kind = ActKind::swiglu, .interleave = 17};
  for (const auto dtype : kVectorDtypes) {
    const auto a = values({40, 60}, dtype) / 4, b = values({60, 68}, dtype) / 4;
    check(a, b, {.act = act});
    check(a, b.narrow(1, 0, 34), {.act_grad = act, .act_input = values({40, 68}, dtype), .keep_act_output = true});
  }
}

TEST_F(KernelsVectorGemm, AccumulatesInPlace) {
  for (const auto dtype : kVectorDtypes)
    for (const auto to : kVectorDtypes)
      for (const auto& [m, n, k] : kShapes)
        for (const bool gaps : {false, true}) {
          SCOPED_TRACE(testing::Message() << dtype << " into " << to << " " << m << "," << n << "," << k);
          const auto a = values({k, m}, dtype).t(), b = values({k, n}, dtype);
          const auto out = values({m, n}, to, gaps);
          check(a, b, {.scale = 0.5, .addend = out, .out = out});
          check(a, b, {.out = out});
          out.copy_(at::randn({m, n}));  // an addend that differs from the product, which may be computed in `out`
          check(a, b, {.bias = values({n}, dtype), .addend = out, .out = out});
        }
}

TEST_F(KernelsVectorGemm, TransposedOperandsMatchViews) {
  for (const auto dtype : kVectorDtypes)
    for (const auto& [m, n, k] : kShapes) {
      SCOPED_TRACE(testing::Message() << dtype << " " << m << "," << n << "," << k);
      const auto a = values({k, m}, dtype), b = values({n, k}, dtype, true);
      const auto got = gemm(transposed(a), transposed(b)).out;
      EXPECT_TRUE(at::equal(got, gemm(a.t(), b.t()).out));
    }
}

TEST_F(KernelsVectorGemm, SupportsManyRowsAndAnyStride) {
  const auto a = values({2100, 40}, at::kFloat, true), b = values({40, 70}, at::kFloat, true);
  const Act act{.kind = ActKind::geglu};
  check(a, b, {.bias = at::randn({70}), .act = act, .keep_pre_act = true, .keep_column_sums = true});
  check(a, b,
        {.act_grad = act,
         .act_input = values({2100, 140}, at::kFloat),
         .keep_act_output = true,
         .keep_column_sums = true});
}

}  // namespace
}  // namespace weft::kernels
