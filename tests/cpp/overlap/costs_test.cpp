#include "weft/overlap/costs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "weft/overlap/blocks.h"

namespace weft::testing {
namespace {

using comm::CommOp;
using overlap::Costs;
using overlap::OverlapShape;
using overlap::predict;
using overlap::rejection_reason;
using ::testing::HasSubstr;

/// A 1 TFLOP/s core and a 1 Gb/s network whose transfers take a twentieth of the core's time.
constexpr Costs kNetwork{.per_flop = 1e-12,
                         .per_weight = 5e-11,
                         .latency = 20e-6,
                         .per_byte = 8e-9,
                         .cpu_per_byte = 4e-10,
                         .plain_latency = 200e-6,
                         .plain_per_byte = 8.4e-9};

OverlapShape gather(int64_t rows) { return {CommOp::all_gather, at::kBFloat16, rows, 4096, 1024, 2}; }

TEST(OverlapCosts, BytesCountBlocksOfPeers) {
  EXPECT_EQ(gather(128).bytes(), 128 * 1024 * 2);
  EXPECT_EQ((OverlapShape{CommOp::reduce_scatter, at::kFloat, 10, 64, 32, 3}).bytes(), 2 * 10 * 64 * 4);
}

TEST(OverlapCosts, AllReduceCountsTwice) {
  const OverlapShape once{CommOp::reduce_scatter, at::kBFloat16, 512, 4096, 1024, 2};
  OverlapShape twice = once;
  twice.op = CommOp::all_reduce;
  const auto one = predict(once, kNetwork, /*zero_copy=*/true), two = predict(twice, kNetwork, /*zero_copy=*/true);
  EXPECT_NEAR(two.plain - one.plain, kNetwork.plain_latency + once.bytes() * kNetwork.plain_per_byte, 1e-9);
  EXPECT_NEAR(two.overlapped - one.overlapped, kNetwork.latency + once.bytes() * kNetwork.cpu_per_byte, 1e-9);
}

TEST(OverlapCosts, NetworkTimeIsMaxOfGemmAndTransfer) {
  const auto p = predict(gather(1024), kNetwork, /*zero_copy=*/false);
  const double gemm = kNetwork.gemm(2048, 4096, 1024), bytes = 1024 * 1024 * 2;
  EXPECT_NEAR(p.plain, gemm + 200e-6 + bytes * 8.4e-9, 1e-9);
  EXPECT_LT(p.overlapped, p.plain);
  EXPECT_GE(p.overlapped, std::max(gemm, bytes * kNetwork.per_byte));
  EXPECT_EQ(rejection_reason(gather(1024), p, false), "");
}

TEST(OverlapCosts, RejectsFewRowsOverNetwork) {
  Costs quick = kNetwork;
  quick.per_byte = quick.plain_per_byte = 1e-11;
  quick.plain_latency = quick.latency;
  const auto p = predict(gather(16), quick, false);
  EXPECT_GT(p.overlapped, p.plain);
  EXPECT_THAT(rejection_reason(gather(16), p, false), HasSubstr("must save at least 15 %"));
}

TEST(OverlapCosts, ZeroCopyAcceptsAnyGain) {
  const auto p = predict(gather(64), kNetwork, /*zero_copy=*/true);
  EXPECT_LT(p.overlapped, p.plain);
  EXPECT_EQ(rejection_reason(gather(64), p, true), "");
  EXPECT_THAT(rejection_reason(gather(0), p, true), HasSubstr("no rows"));
}

TEST(OverlapCosts, SlowCpusTimeSmallGemms) {
  EXPECT_EQ(overlap::timed_width(1e-4), overlap::kFastWidth);
  EXPECT_EQ(overlap::timed_width(2.9e-3), overlap::kFastWidth);
  EXPECT_EQ(overlap::timed_width(0.05), overlap::kSlowWidth);
}

TEST(OverlapBlocks, WireColumnsFitPaddingAndStayDistinct) {
  for (const int64_t rows : {1, 31, 32, 33, 100}) {
    std::set<int64_t> seen;
    for (int64_t columns = 0; columns < 200; ++columns) {
      const int64_t values = (rows + 31) / 32 * ((columns + 31) / 32) * 32 * 32;
      const auto sent_columns = overlap::wire_columns(values, rows, columns);
      EXPECT_GE(sent_columns * rows, values);
      EXPECT_TRUE(seen.insert(sent_columns).second) << rows << " rows, " << columns << " columns";
    }
  }
  EXPECT_EQ(overlap::wire_columns(0, 0, 7), 7);
}

}  // namespace
}  // namespace weft::testing
