// The rotary embedding in the best tier against the ATen calls, for every vector tail.
#include "weft/kernels/rotary.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "weft/kernels/sequence_offsets.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

TEST(KernelsRotary, MatchesAten) {
  at::manual_seed(1);
  for (const bool interleaved : {false, true})
    for (const int64_t pairs : {1, 3, 7, 8, 9, 15, 16, 17, 33})
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        const RotaryHeads heads{2 * pairs + 3, 2 * pairs, 2, 3, 1, interleaved};
        const auto x = at::randn({2, 5, 3, heads.width()}).to(dtype);
        const auto tables = rotary_tables(6, heads, 100, x);
        for (const auto direction : {RotaryDirection::forward, RotaryDirection::inverse})
          EXPECT_TRUE(at::allclose(rotary(x, tables, heads, direction), ref::rotary(x, tables, heads, direction),
                                   1e-2 * static_cast<double>(dtype != at::kFloat), 1e-5))
              << pairs << " pairs, " << dtype;
      }
}

TEST(KernelsRotary, InverseUndoesRotation) {
  const RotaryHeads heads{8, 6, 1, 2, 1, true};
  const auto x = at::randn({1, 4, 2, heads.width()});
  const auto tables = rotary_tables(4, heads, 10000, x);
  const auto y = rotary(x, tables, heads, RotaryDirection::forward);
  EXPECT_FALSE(at::allclose(y, x));
  EXPECT_TRUE(at::allclose(rotary(y, tables, heads, RotaryDirection::inverse), x, 1e-5, 1e-6));
}

TEST(KernelsRotary, OffsetsAreChecked) {
  const auto offsets = [](std::vector<int64_t> values) { return SequenceOffsets(at::tensor(values), 5); };
  EXPECT_EQ(offsets({0, 2, 2, 5}).longest(), 3);
  EXPECT_EQ(offsets({0, 2, 2, 5}).sequences(), 3);
  for (const auto& invalid : {std::vector<int64_t>{}, {1, 5}, {0, 4}, {0, 6}, {0, 3, 2, 5}, {0, -1, 5}})
    EXPECT_THROW(offsets(invalid), c10::ValueError);
}

}  // namespace
}  // namespace weft::kernels
