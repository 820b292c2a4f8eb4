// Packed copies of frozen weights are cached between GEMMs until the weight is unfrozen, freed or frozen again.
#include "weft/kernels/packing.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weft/kernels/gemm.h"
#include "weft/kernels/tier.h"

namespace weft::kernels {
namespace {

using at::Tensor;

constexpr int64_t kSize = 64, kBytes = kSize * kSize * 2;

class KernelsPacking : public testing::Test {
 protected:
  void SetUp() override {
    if (machine_tier() != Tier::amx) GTEST_SKIP() << "weights are packed by the amx tier only";
    before_ = packing_counts();
  }
  void TearDown() override { set_packing_limit(limit_); }

  Tensor weight(int64_t rows = kSize, int64_t columns = kSize) const {
    return at::randn({rows, columns}).to(at::kBFloat16);
  }
  Tensor product(const Tensor& w) const { return gemm(x_.narrow(1, 0, w.size(1)), w.t(), {.b_is_weight = true}).out; }
  void expect_matches_unfrozen(const Tensor& w) const { EXPECT_TRUE(product(w).equal(product(w.clone()))); }
  int64_t packed() const { return packing_counts().packed - before_.packed; }
  int64_t reused() const { return packing_counts().reused - before_.reused; }

  const Tensor x_ = at::randn({100, 2 * kSize}).to(at::kBFloat16);

 private:
  const int64_t limit_ = packing_limit();
  PackingCounts before_;
};

TEST_F(KernelsPacking, OnlyFrozenWeightsAreCached) {
  const auto w = weight();
  for (int i = 0; i < 3; ++i) product(w);
  EXPECT_EQ(packed_bytes(), 0);
  freeze(w);
  for (int i = 0; i < 3; ++i) expect_matches_unfrozen(w);
  EXPECT_EQ(packed_bytes(), kBytes);
  EXPECT_EQ(packed(), 1);
  EXPECT_EQ(reused(), 2);
  unfreeze(w);
  EXPECT_EQ(packed_bytes(), 0);
}

TEST_F(KernelsPacking, EachLayoutHasItsOwnCopy) {
  const auto w = weight();
  const auto x = x_.narrow(1, 0, kSize);
  const Epilogue gated{.act = Act{.kind = ActKind::swiglu}, .b_is_weight = true};
  freeze(w);
  for (int i = 0; i < 3; ++i) {
    expect_matches_unfrozen(w);
    EXPECT_TRUE(gemm(x, w, {.b_is_weight = true}).out.equal(gemm(x, w.clone(), {.b_is_weight = true}).out));
    EXPECT_TRUE(gemm(x, w.t(), gated).out.equal(gemm(x, w.clone().t(), gated).out));
  }
  EXPECT_EQ(packed(), 3);
}

TEST_F(KernelsPacking, ChangedFrozenWeightRaisesByName) {
  for (const auto& w : {weight(), weight(45, 39)}) {
    freeze(w, "up.weight");
    product(w);
    w[3][5].add_(64);
    for (int i = 0; i < 2; ++i)
      EXPECT_THAT([&] { product(w); },
                  testing::ThrowsMessage<c10::Error>(testing::HasSubstr("up.weight was changed in place")));
    freeze(w);
    expect_matches_unfrozen(w);
    unfreeze(w);
    w.neg_();
    expect_matches_unfrozen(w);
  }
}

TEST_F(KernelsPacking, VersionBumpWithoutChangeDoesNotRaise) {
  const auto both = at::stack({weight(45, 39), weight(45, 39)});
  const auto w = both[0], other = both[1];  // share a version counter
  freeze(w);
  for (int i = 0; i < 3; ++i) {
    expect_matches_unfrozen(w);
    other.neg_();
    expect_matches_unfrozen(other);
  }
  EXPECT_EQ(packed(), 1);
}

TEST_F(KernelsPacking, FreezingAViewDropsCopiesOfTheBase) {
  const auto w = weight();
  const auto data = w.variable_data();  // has its own version counter
  freeze(w);
  product(w);
  data.neg_();
  freeze(w.narrow(0, 0, 8));
  expect_matches_unfrozen(w);
}

TEST_F(KernelsPacking, CacheRespectsLimitAndDropsDeadWeights) {
  set_packing_limit(2 * kBytes);
  std::vector<Tensor> weights;
  for (int i = 0; i < 4; ++i) {
    freeze(weights.emplace_back(weight()));
    for (int use = 0; use < 2; ++use) expect_matches_unfrozen(weights.back());
    EXPECT_EQ(packed_bytes(), std::min(i + 1, 2) * kBytes);
  }
  weights.erase(weights.begin());
  EXPECT_EQ(packed_bytes(), kBytes);
  expect_matches_unfrozen(weights.back());
  EXPECT_EQ(packed_bytes(), 2 * kBytes);
  set_packing_limit(kBytes);
  EXPECT_EQ(packed_bytes(), kBytes);
  weights.clear();
  EXPECT_EQ(packed_bytes(), 0);
}

TEST_F(KernelsPacking, NegativeLimitIsRejected) { EXPECT_THROW(set_packing_limit(-1), c10::ValueError); }

}  // namespace
}  // namespace weft::kernels
