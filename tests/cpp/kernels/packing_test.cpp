// Packed copies of weights: kept between products, never older than the weight.
#include "weft/kernels/packing.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>

#include "weft/kernels/gemm.h"
#include "weft/kernels/tier.h"

namespace weft::kernels {
namespace {

using at::Tensor;

constexpr int64_t kSize = 512, kRows = 256, kBytes = kSize * kSize * 2;  // the least that is kept

class KernelsPacking : public testing::Test {
 protected:
  void SetUp() override {
    if (machine_tier() != Tier::amx) GTEST_SKIP() << "weights are packed by the amx tier only";
    set_packing_limit(0);  // forgets all copies
    set_packing_limit(limit_);
    before_ = packing_counts();
  }
  void TearDown() override { set_packing_limit(limit_); }

  Tensor weight() const { return at::randn({kSize, kSize}).to(at::kBFloat16); }
  Tensor product(const Tensor& w) const { return gemm(x_, w.t(), {.weight = true}).out; }
  void expect_right(const Tensor& w) const { EXPECT_TRUE(product(w).equal(product(w.clone()))); }
  int64_t packed() const { return packing_counts().packed - before_.packed; }
  int64_t verified() const { return packing_counts().verified - before_.verified; }
  int64_t stale() const { return packing_counts().stale - before_.stale; }
  int64_t frozen() const { return packing_counts().frozen - before_.frozen; }

  const Tensor x_ = at::randn({kRows, kSize}).to(at::kBFloat16);

 private:
  const int64_t limit_ = packing_limit();
  PackingCounts before_;
};

TEST_F(KernelsPacking, ACopyIsMadeAtTheSecondUseAndVerifiedAfterwards) {
  const auto w = weight();
  product(w);
  EXPECT_EQ(packed_bytes(), 0);
  for (int i = 0; i < 8; ++i) product(w);
  EXPECT_EQ(packed_bytes(), kBytes);
  EXPECT_EQ(packed(), 1);
  EXPECT_EQ(verified(), 7);
  EXPECT_EQ(stale(), 0);
}

TEST_F(KernelsPacking, OneChangedValueIsSeenHoweverOftenTheWeightWasUsedBefore) {
  const auto w = weight();
  for (const int64_t place : {int64_t{0}, kSize * kSize - 1, kSize * kSize / 2, int64_t{31}, int64_t{100'003}})
    for (int uses = 1; uses < 10; uses += 2) {
      for (int i = 0; i < uses; ++i) product(w);
      w.view(-1).select(0, place).add_(64);
      expect_right(w);
    }
  EXPECT_GT(stale(), 0);
}

TEST_F(KernelsPacking, AWeightThatChangesBeforeEachUseKeepsNoCopyUntilItStays) {
  const auto w = weight();
  const auto train = [&](int steps) {
    for (int i = 0; i < steps; ++i) {
      w.add_(1);
      EXPECT_TRUE(product(w).equal(gemm(x_, w.t()).out));
    }
  };
  train(10);
  EXPECT_EQ(packed_bytes(), 0);
  const auto looked = packed();
  train(20);
  EXPECT_EQ(packed(), looked);
  for (int i = 0; i < 40; ++i) product(w);
  EXPECT_EQ(packed_bytes(), kBytes);
  EXPECT_EQ(packed(), looked + 1);
  train(1);  // once is no habit
  EXPECT_EQ(packed_bytes(), kBytes);
}

TEST_F(KernelsPacking, SwappedRowsAndValuesAreSeen) {
  const auto w = weight();
  for (int i = 0; i < 4; ++i) product(w);
  w.copy_(w.index_select(0, at::randperm(kSize)));
  expect_right(w);
  const auto flat = w.view(-1);
  const auto first = flat[64].clone();
  flat[64].copy_(flat[128]);
  flat[128].copy_(first);
  expect_right(w);
  EXPECT_EQ(stale(), 2);
}

TEST_F(KernelsPacking, BothDirectionsOfAWeightAndGatedOrderHaveCopiesOfTheirOwn) {
  const auto w = weight();
  const Epilogue gated{.act = Act{.kind = ActKind::swiglu}, .weight = true};
  for (int i = 0; i < 3; ++i) {
    product(w);
    gemm(x_, w, {.weight = true});
    gemm(x_, w.t(), gated);
  }
  EXPECT_EQ(packed(), 3);
  w.neg_();
  expect_right(w);
  EXPECT_TRUE(gemm(x_, w, {.weight = true}).out.equal(gemm(x_, w.clone(), {.weight = true}).out));
  EXPECT_TRUE(gemm(x_, w.t(), gated).out.equal(gemm(x_, w.clone().t(), gated).out));
}

TEST_F(KernelsPacking, FrozenWeightsAreNotLookedAtUntilTheyThawOrFreezeAgain) {
  const auto both = at::stack({weight(), weight()});
  const auto w = both[0], other = both[1];
  freeze(w);
  for (int i = 0; i < 3; ++i) product(w);
  EXPECT_EQ(frozen(), 2);
  both.neg_();
  freeze(w);
  expect_right(w);
  for (int i = 0; i < 3; ++i) product(other);
  other.neg_();  // in the same storage, and not frozen
  expect_right(other);
  thaw(w);
  w.neg_();
  expect_right(w);
}

TEST_F(KernelsPacking, TheLimitHoldsAndCopiesDieWithTheirWeights) {
  set_packing_limit(2 * kBytes);
  std::vector<Tensor> weights;
  for (int i = 0; i < 5; ++i) {
    weights.push_back(weight());
    for (int use = 0; use < 2; ++use) product(weights.back());
    EXPECT_LE(packed_bytes(), 2 * kBytes);
  }
  EXPECT_EQ(packed_bytes(), 2 * kBytes);
  weights.pop_back();
  EXPECT_EQ(packed_bytes(), kBytes);
  weights.clear();
  EXPECT_EQ(packed_bytes(), 0);
}

TEST_F(KernelsPacking, MemoryThatComesAndGoesGetsNoCopy) {
  const auto w = weight();
  const auto values = w.clone();
  for (int i = 0; i < 4; ++i) {
    product(w);
    product(w);
    w.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr());
    EXPECT_EQ(packed_bytes(), 0);
    w.storage().unsafeGetStorageImpl()->set_data_ptr(at::getCPUAllocator()->allocate(kBytes));
    w.copy_(values.neg_());
    expect_right(w);
  }
  EXPECT_EQ(packed(), 1);
}

TEST_F(KernelsPacking, ThreadsMayShareAWeightAndChangeTheirOwn) {
  const auto shared = weight();
  const auto right = product(shared.clone());
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      const auto own = weight();
      for (int i = 0; i < 20; ++i) {
        if (!product(shared).equal(right)) ++wrong;
        if (i % 3 == 0) own.add_(1);
        if (!product(own).equal(product(own.clone()))) ++wrong;
        if (i % 7 == 0) set_packing_limit((1 + i % 4) * kBytes);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(KernelsPacking, ANegativeLimitIsRefused) { EXPECT_THROW(set_packing_limit(-1), c10::ValueError); }

}  // namespace
}  // namespace weft::kernels
