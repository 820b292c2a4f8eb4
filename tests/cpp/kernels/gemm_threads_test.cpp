// GEMMs split over many threads: every block is computed once, results do not depend on the schedule, and operands are
// packed once.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/cpp/kernels/gemm_bound.h"
#include "tests/cpp/kernels/threads.h"
#include "weft/kernels/cpu/gemm_grid.h"
#include "weft/kernels/gemm.h"

namespace weft::kernels {
namespace {

using at::Tensor;

TEST(GemmGrid, OneThreadIsNotSplit) { EXPECT_EQ(choose_grid(dense_gemm_work(1024, 4096, 1024, true), 1), GemmGrid{}); }

TEST(GemmGrid, HasAtMostTheGivenThreadsAndNoEmptyShare) {
  for (const int threads : {2, 3, 7, 16, 61, 64, 128})
    for (const int64_t m : {1, 40, 128, 1000})
      for (const int64_t n : {1, 32, 500, 4096})
        for (const int64_t k : {1, 512, 8192}) {
          const auto work = dense_gemm_work(m, n, k, true);
          const auto grid = choose_grid(work, threads);
          EXPECT_LE(grid.threads(), threads);
          EXPECT_LE(grid.resident, work.resident_panels);
          EXPECT_LE(grid.streamed, work.streamed_panels);
          EXPECT_LE(grid.k, work.k_steps);
        }
}

TEST(GemmGrid, GatedPairsStayTogether) {
  auto work = dense_gemm_work(512, 704, 512, false);
  work.panels_per_unit = 2;
  EXPECT_LE(choose_grid(work, 128).streamed, work.streamed_panels / 2);
}

TEST(GemmGrid, KIsSplitOnlyWhereSumsCanBeAddedLater) {
  EXPECT_EQ(choose_grid(dense_gemm_work(64, 64, 8192, false), 64).k, 1);
  EXPECT_GT(choose_grid(dense_gemm_work(64, 64, 8192, true), 64).k, 1);
}

/// Linears and weight gradients of 128 to 8192 rows and 512 to 8192 features that have at least 8 blocks per thread.
TEST(GemmGrid, SharesAreBalanced) {
  for (const int threads : {16, 24, 48, 64, 96, 128})
    for (const int64_t m : {128, 512, 1000, 2048, 8192})
      for (const int64_t d : {512, 768, 1408, 2816, 8192})
        for (const bool wgrad : {false, true}) {
          const auto work = wgrad ? dense_gemm_work(d, 4 * d, m, true) : dense_gemm_work(m, 4 * d, d, false);
          if (work.resident_panels * work.streamed_panels < 8 * threads) continue;
          const auto grid = choose_grid(work, threads);
          EXPECT_LE(imbalance(work, grid, threads), 1.15)
              << m << " rows, " << d << " features, " << threads << " threads, grid " << grid.resident << " x "
              << grid.streamed << " x " << grid.k;
        }
}

class KernelsGemmThreads : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::manual_seed(3); }

  /// Compares with float64, and two runs with each other.
  static void check(const Matrix& a, const Matrix& b, const Epilogue& e, const std::string& what) {
    const BoundedGemm want(gemm_tier(a, b, e), a, b, e);
    const Threads threads(GetParam());
    const auto first = gemm(a, b, e);
    expect_within(first, want, what);
    if (e.addend.defined() && e.addend.is_same(e.out)) return;
    const auto second = gemm(a, b, e);
    for (const auto part : {&GemmResult::out, &GemmResult::pre_act, &GemmResult::column_sums}) {
      if (!(first.*part).defined()) continue;
      EXPECT_TRUE(at::equal(first.*part, second.*part)) << what << ": two runs differ";
    }
  }
};

TEST_P(KernelsGemmThreads, LinearMatchesFloat64) {
  for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{
           {1, 4096, 64}, {33, 70, 40}, {130, 1000, 200}, {520, 300, 96}, {64, 96, 2400}}) {
    const auto what = c10::str(m, " x ", n, " x ", k);
    const auto a = random({m, k}), w = random({n, k}), b = random({k, n});
    check(a, transposed(w), {.bias = random({n})}, what);
    check(a, b, {.keep_column_sums = true, .addend = random({m, n})}, what + " column sums");
    check(a, transposed(w), {.act = Act{ActKind::gelu}, .keep_pre_act = true}, what + " GELU");
    check(a, transposed(w), {.act = Act{ActKind::swiglu}}, what + " SwiGLU");
  }
}

TEST_P(KernelsGemmThreads, WeightGradientMatchesFloat64) {
  for (const auto& [rows, n, k] : std::vector<std::array<int64_t, 3>>{
           {16, 64, 96}, {64, 32, 32}, {700, 40, 70}, {2500, 64, 96}, {4096, 33, 65}, {512, 256, 160}}) {
    const auto what = c10::str(rows, " rows, ", n, " x ", k);
    const auto dy = random({rows, n}), x = random({rows, k});
    const auto main_grad = random({n, k}, at::kFloat);
    check(transposed(dy), x, {}, what);
    check(transposed(dy), x, {.scale = 0.5, .dtype = at::kFloat}, what + " float32");
    check(transposed(dy), x, {.addend = main_grad, .out = main_grad}, what + " main_grad");
  }
}

TEST_P(KernelsGemmThreads, LinearDoesNotDependOnTheNumberOfThreads) {
  if (machine_tier() != Tier::amx) GTEST_SKIP() << "this CPU has no amx";
  const auto a = random({40, 4096}), w = random({500, 4096});
  const auto one = [&] {
    const Threads threads(1);
    return gemm(a, transposed(w), {}).out;
  }();
  const Threads threads(GetParam());
  EXPECT_TRUE(at::equal(gemm(a, transposed(w), {}).out, one));
}

/// A weight gradient whose left operand was packed by the GEMM that computed it, also split along K.
TEST_P(KernelsGemmThreads, PackedOperandGivesTheSameWeightGradient) {
  if (machine_tier() != Tier::amx) GTEST_SKIP() << "this CPU has no amx";
  const Threads threads(GetParam());
  const auto x = random({2048, 70});
  const auto dy = gemm(random({2048, 40}), random({40, 64}),
                       {.act_grad = Act{}, .act_input = random({2048, 64}), .keep_packed_transpose = true});
  ASSERT_TRUE(dy.packed_transpose.defined());
  EXPECT_TRUE(at::equal(gemm(transposed(dy.out, dy.packed_transpose), x).out, gemm(transposed(dy.out), x).out));
}

/// Each operand is packed once, whatever the number of threads: 64 threads that packed for themselves would pack 8
/// times the bytes. A thread that another one keeps waiting packs a second time, which happens if there are few cores.
TEST_P(KernelsGemmThreads, OperandsArePackedOnce) {
  if (machine_tier() != Tier::amx) GTEST_SKIP() << "this CPU has no amx";
  const auto a = random({512, 512}), w = random({1024, 512}), dy = random({512, 1024});
  const auto packed = [&](const Matrix& left, const Matrix& right, int threads) {
    const Threads scope(threads);
    auto least = std::numeric_limits<double>::infinity();
    for (int run = 0; run < 3; ++run) {
      const auto before = gemm_packed_bytes();
      gemm(left, right, {});
      least = std::min(least, static_cast<double>(gemm_packed_bytes() - before));
    }
    return least;
  };
  EXPECT_LE(packed(a, transposed(w), GetParam()) / packed(a, transposed(w), 1), 1.5);
  EXPECT_LE(packed(transposed(dy), a, GetParam()) / packed(transposed(dy), a, 1), 1.5);
}

INSTANTIATE_TEST_SUITE_P(Threads, KernelsGemmThreads, testing::Values(2, 7, 64));

}  // namespace
}  // namespace weft::kernels
