#include "weft/quant/delayed_scaling.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>

namespace weft::quant {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Step {
  float amax, by_max, by_most_recent;
  std::vector<float> history;  // after the step
};

const std::vector<Step>& steps() {
  static const std::vector<Step> list{{2, 224, 224, {0, 0, 0, 2}},
                                      {.5F, 224, 896, {0, 0, 2, .5F}},
                                      {0, 224, 896, {0, 0, 2, .5F}},
                                      {kInf, 224, 896, {0, 2, .5F, kInf}},
                                      {.25F, 224, 1792, {0, .5F, kInf, .25F}},
                                      {.125F, 224, 3584, {0, kInf, .25F, .125F}},
                                      {.0625F, 224, 7168, {0, .25F, .125F, .0625F}},
                                      {.03125F, 1792, 14336, {0, .125F, .0625F, .03125F}}};
  return list;
}

std::vector<float> column(const at::Tensor& state) {
  const auto* data = state.const_data_ptr<float>();
  return {data, data + state.numel()};
}

TEST(DelayedScaling, HistoryDeterminesScale) {
  for (const auto algo : {AmaxAlgo::max, AmaxAlgo::most_recent}) {
    const auto state = make_delayed_state(4, 1);
    for (const auto& step : steps()) {
      record_amax(state, 0, at::full({1}, step.amax));
      update_delayed_state(state, {}, 448, {.amax_compute_algo = algo});
      std::vector<float> expected{algo == AmaxAlgo::max ? step.by_max : step.by_most_recent};
      expected.insert(expected.end(), step.history.begin(), step.history.end());
      EXPECT_EQ(column(state), expected) << step.amax;
    }
  }
}

TEST(DelayedScaling, MarginDividesScale) {
  const auto state = make_delayed_state(1, 1);
  record_amax(state, 0, at::full({1}, 3.F));
  update_delayed_state(state, {}, 57344, {.margin = 2});
  EXPECT_EQ(column(state), (std::vector<float>{4778.6665F, 0}));
}

TEST(DelayedScaling, ReducedMaximaReplaceThoseOfTheRank) {
  const auto state = make_delayed_state(2, 2);
  record_amax(state, 0, at::full({1}, 1.F));
  const auto reduced = at::full({2}, 4.F);
  update_delayed_state(state, reduced, 448, {});
  EXPECT_EQ(column(state), (std::vector<float>{112, 112, 0, 0, 4, 4}));
}

TEST(DelayedScaling, ThreadsRecordTheLargestMaximum) {
  const auto state = make_delayed_state(2, 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) record_amax(state, 0, at::full({1}, static_cast<float>(i * 4 + t)));
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(column(state)[1], 399);
}

}  // namespace
}  // namespace weft::quant
