// Packed copies and pooled buffers under concurrent use. Needs no AMX. The ThreadSanitizer build runs it, and skips
// suites named Kernels*.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>

#include "weft/kernels/cpu/packed_weight_cache.h"
#include "weft/kernels/packing.h"

namespace weft::kernels {
namespace {

using at::Tensor;

constexpr int kThreads = 4, kRounds = 200;
constexpr int64_t kValues = 256;

Tensor filled(int64_t value) { return at::full({1, kValues}, value, at::kShort); }

PackRequest request_for(const Tensor& t) {
  return {.source = t, .bytes = kValues * 2, .pack = [from = t.const_data_ptr<int16_t>()](uint16_t* to) {
            std::copy_n(from, kValues, to);
          }};
}
bool contains_only(const std::shared_ptr<const PackedCopy>& copy, uint16_t value) {
  return !copy || std::all_of(copy->data(), copy->data() + kValues, [&](uint16_t v) { return v == value; });
}

void on_threads(const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back(run, t);
  for (auto& thread : threads) thread.join();
}

TEST(PackedWeightsInThreads, SharedWeightSurvivesConcurrentFreezeAndUnfreeze) {
  const auto limit = packing_limit();
  const auto shared = filled(7);
  freeze(shared);
  std::atomic<int> wrong = 0;
  on_threads([&](int t) {
    for (int i = 0; i < kRounds; ++i) {
      wrong += !contains_only(packed_frozen_weight(request_for(shared)), 7);
      if (i % 16 == t) freeze(shared);
      auto own = filled(100 * t);
      freeze(own);
      wrong += !contains_only(packed_frozen_weight(request_for(own)), 100 * t);
      own.fill_(i);
      i % 2 ? freeze(own) : unfreeze(own);
      wrong += !contains_only(packed_frozen_weight(request_for(own)), i);
      if (i % 8 == t) set_packing_limit(kValues * 2 * (1 + i % 5));
      wrong += packed_bytes() < 0;
    }
  });
  EXPECT_EQ(wrong, 0);
  unfreeze(shared);
  EXPECT_EQ(packed_bytes(), 0);
  set_packing_limit(limit);
}

/// Another thread may change and freeze a weight while it is being packed.
TEST(PackedWeightsInThreads, RefreezeDropsCopyOfOldValues) {
  const auto w = filled(1);
  const auto data = w.variable_data();  // the version counter of `w` does not record writes to it
  freeze(w);
  auto request = request_for(w);
  request.pack = [&, pack = request.pack](uint16_t* to) {
    pack(to);
    data.fill_(2);
    freeze(w);
  };
  packed_frozen_weight(request);
  EXPECT_TRUE(contains_only(packed_frozen_weight(request_for(w)), 2));
  unfreeze(w);
}

/// A reader thread drops the last reference, and the buffer may be acquired again before that thread is joined.
TEST(PackedWeightsInThreads, BufferIsExclusiveUntilReleased) {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < kRounds; ++i) {
    auto mine = acquire_buffer(kValues * 2);
    std::fill_n(mine->data(), kValues, static_cast<uint16_t>(i));
    readers.emplace_back([&wrong, i, copy = std::move(mine)]() mutable {
      wrong += !contains_only(copy, i);
      copy.reset();
    });
  }
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST(PackedWeightsInThreads, ReleasedBufferIsReused) {
  constexpr int64_t kBytes = 48 << 20;  // larger than any buffer that other tests released
  const auto* first = acquire_buffer(kBytes)->data();
  const auto second = acquire_buffer(kBytes - 1);
  EXPECT_EQ(second->data(), first);
  EXPECT_NE(acquire_buffer(kBytes - 1)->data(), first);
}

}  // namespace
}  // namespace weft::kernels
