// Memory behaviour of fusions: which buffers they reuse, and what they save for backward.
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "tests/cpp/fuser/testing.h"
#include "weft/core/dispatch_keys.h"
#include "weft/fused/rules.h"
#include "weft/fuser/autograd.h"
#include "weft/fuser/call_validation.h"
#include "weft/fuser/executor.h"
#include "weft/fuser/infer.h"

namespace weft::fused {
namespace {

using fuser::Fuser;
using fuser::Pipeline;
using weft::testing::expect_close;
using weft::testing::leaf;

/// Counts allocations of at least `min_bytes` bytes on this thread.
class Allocations final : public c10::MemoryReportingInfoBase {
 public:
  explicit Allocations(int64_t min_bytes) : min_bytes_(min_bytes) {}
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override { count += size >= min_bytes_; }
  bool memoryProfilingEnabled() const override { return true; }

  int count = 0;

 private:
  int64_t min_bytes_;
};

struct Counted {
  int allocations;
  at::Tensor dx;
};

/// Backward of MakeExtraOutput and BasicLinear, [256, 64] -> [256, 4], with dy = 1 and the residual gradient `g`.
Counted linear_add_backward(bool in_place, at::Tensor g) {
  const auto pipeline = Pipeline::parse(std::string("MakeExtraOutput(in_place=") + (in_place ? "true" : "false") +
                                        "); BasicLinear(in_features=64, out_features=4)");
  const auto x = at::randn({256, 64}).requires_grad_();
  const std::vector<at::Tensor> params{at::ones({4, 64}).requires_grad_()};
  const auto plan = fuser::make_plan(pipeline, fuser::make_plan_key(pipeline, x, params, {}, 0), *current_rules().list);
  EXPECT_EQ(plan->backward.size(), 1);
  const BelowAutograd below;
  std::vector<at::Tensor> saved(plan->num_saved), extra_out(1), grads(1);
  ops::Frame frame{
      .saved = saved.data(), .extra_out = extra_out.data(), .param_grads = grads.data(), .params = params.data()};
  run_forward(pipeline, *plan, frame, x.detach());
  extra_out[0] = std::move(g);
  const auto counter = std::make_shared<Allocations>(x.nbytes());
  auto dy = at::ones({256, 4});
  at::Tensor dx;
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
    dx = run_backward(pipeline, *plan, frame, std::move(dy));
  }
  return {counter->count, dx};
}

TEST(Fusions, LinearAddAllocatesNoActivation) {
  auto g = at::ones({256, 64});
  const auto* memory = g.data_ptr();
  const auto [allocations, dx] = linear_add_backward(true, std::move(g));
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(dx.data_ptr(), memory) << "dx is not in the buffer of the residual gradient";
  EXPECT_TRUE(dx.eq(5).all().item<bool>());
}

TEST(Fusions, LinearAddKeepsSharedOrOutOfPlaceGradient) {
  for (const bool in_place : {true, false}) {
    const auto held = at::ones({256, 64});
    auto only = at::ones({256, 64});
    const auto [allocations, dx] =
        in_place ? linear_add_backward(true, held) : linear_add_backward(false, std::move(only));
    EXPECT_EQ(allocations, 1) << "expected one allocation, for dx";
    EXPECT_TRUE(held.eq(1).all().item<bool>());
    EXPECT_TRUE(dx.eq(5).all().item<bool>());
  }
}

TEST(Fusions, ResidualAddReusesDonatedExtraInput) {
  for (const std::string middle : {"Bias(size=4); ", "ConstantScale(scale=2.0); ", ""}) {
    for (const bool in_place : {true, false}) {
      Fuser fuser(Pipeline::parse("BasicLinear(in_features=8, out_features=4); " + middle +
                                  "AddExtraInput(in_place=" + (in_place ? "true)" : "false)")));
      const std::vector<at::Tensor> params{at::ones({4, 8}), at::ones({4})};
      const auto x = at::ones({3, 8});
      const auto call = [&](at::Tensor e) {
        const ops::Params given{params.data(), static_cast<size_t>(fuser.pipeline().num_params())};
        EXPECT_EQ(fuser.plan(x, given, {e})->forward.size(), 1);
        fuser::Tensors extras;
        extras.push_back(std::move(e));
        return fuser(x, given, std::move(extras))[0];
      };
      auto given_away = at::ones({3, 4});
      const auto* address = given_away.data_ptr();
      EXPECT_EQ(call(std::move(given_away)).data_ptr() == address, in_place) << middle;
      const auto held = at::ones({3, 4});
      EXPECT_NE(call(held).data_ptr(), held.data_ptr()) << middle;
      EXPECT_TRUE(held.eq(1).all().item<bool>()) << middle;
    }
  }
}

constexpr const char* kBlock =
    "MakeExtraOutput() >>\"r\"; RMSNorm(normalized_shape=[8]); BasicLinear(in_features=8, out_features=12); "
    "Bias(size=12); "
    "GEGLU(); BasicLinear(in_features=6, out_features=8); Bias(size=8); AddExtraInput() <\"r\"";

constexpr const char* kWideBlock =
    "MakeExtraOutput() >>\"r\"; RMSNorm(normalized_shape=[256]); BasicLinear(in_features=256, out_features=256); "
    "Bias(size=256); "
    "GEGLU(); BasicLinear(in_features=128, out_features=256); Bias(size=256); AddExtraInput() <\"r\"";

std::vector<std::string> kept_by_block(const char* text, int64_t width) {
  Fuser fuser(Pipeline::parse(text));
  const auto params = weft::testing::parameters(fuser.pipeline());
  const auto x = leaf({5, width});
  std::vector<std::string> kept;
  for (const auto& slot : infer(fuser.pipeline(), *fuser.plan(x, params, {}), x, params, {}).saved)
    if (slot.spec) kept.push_back(std::to_string(slot.op) + " " + slot.name);
  return kept;
}

TEST(Fusions, WideBlockSavesOnlyNormInputAndPreActivation) {
  EXPECT_EQ(kept_by_block(kWideBlock, 256), (std::vector<std::string>{"1 input", "1 rstd", "4 input"}));
  EXPECT_EQ(kept_by_block(kBlock, 8), (std::vector<std::string>{"1 input", "1 rstd", "2 input", "4 input", "5 input"}));
}

class Blocks : public ::testing::TestWithParam<std::pair<const char*, int64_t>> {};

TEST_P(Blocks, FusesBothPasses) {
  const auto [text, width] = GetParam();
  Fuser fuser(Pipeline::parse(text));
  const auto params = weft::testing::parameters(fuser.pipeline());
  const auto x = leaf({5, width}), dy = at::randn({5, width}, at::kDouble);
  const auto plan = fuser.plan(x, params, {});
  ASSERT_EQ(plan->forward.size(), 1);
  EXPECT_EQ(plan->forward[0].step.rule, "mlp_block");
  EXPECT_EQ(plan->forward[0].step.fused.op, plan->backward[0].step.fused.op);
  const auto unfused = fuser::make_plan(fuser.pipeline(), plan->key, {});
  const auto y = fuser(x, params, {})[0];
  const auto plain = run_plan(fuser.shared_pipeline(), unfused, x, params, {})[0];
  expect_close(y, plain, "y");
  std::vector<at::Tensor> inputs{x};
  inputs.insert(inputs.end(), params.begin(), params.end());
  const auto got = weft::testing::grad(y, inputs, dy), expected = weft::testing::grad(plain, inputs, dy);
  for (size_t i = 0; i < expected.size(); ++i) expect_close(got[i], expected[i], "gradient " + std::to_string(i));
}

TEST_P(Blocks, SupportsAnyFrozenSubset) {
  const auto [text, width] = GetParam();
  Fuser fuser(Pipeline::parse(text));
  auto params = weft::testing::parameters(fuser.pipeline());
  const auto dy = at::randn({5, width}, at::kDouble);
  const auto count = params.size() + 1;
  for (unsigned mask = 1; mask < 1U << count; ++mask) {
    auto x = leaf({5, width});
    x.requires_grad_((mask & 1U) != 0);
    std::vector<at::Tensor> inputs;
    if ((mask & 1U) != 0) inputs.push_back(x);
    for (size_t p = 0; p < params.size(); ++p) {
      params[p].requires_grad_((mask >> (p + 1) & 1U) != 0);
      if (params[p].requires_grad()) inputs.push_back(params[p]);
    }
    const auto key = fuser::make_plan_key(fuser.pipeline(), x, params, {}, 0);
    const auto plain = run_plan(fuser.shared_pipeline(), fuser::make_plan(fuser.pipeline(), key, {}), x, params, {})[0];
    const auto y = fuser(x, params, {})[0];
    expect_close(y, plain, "y");
    const auto got = weft::testing::grad(y, inputs, dy), expected = weft::testing::grad(plain, inputs, dy);
    for (size_t i = 0; i < expected.size(); ++i) expect_close(got[i], expected[i], "mask " + std::to_string(mask));
  }
}

INSTANTIATE_TEST_SUITE_P(Fusions, Blocks, ::testing::Values(std::pair{kBlock, 8L}, std::pair{kWideBlock, 256L}),
                         [](const auto& info) { return info.param.second == 8 ? "narrow" : "wide"; });

TEST(Fusions, RulesCanBeDisabledAndReenabled) {
  Fuser fuser(Pipeline::parse("BasicLinear(in_features=4, out_features=4); Bias(size=4)"));
  const auto params = weft::testing::parameters(fuser.pipeline());
  const auto x = leaf({2, 4});
  EXPECT_EQ(fuser.plan(x, params, {})->forward.size(), 1);
  std::vector<int64_t> ids;
  for (const auto& [id, rule] : *current_rules().list)
    if (name_of(rule) == "linear_bias") ids.push_back(id);
  disable_rules(ids);
  EXPECT_EQ(fuser.plan(x, params, {})->forward.size(), 2);
  EXPECT_EQ(enable_rules(ids), ids);
  EXPECT_EQ(fuser.plan(x, params, {})->forward.size(), 1);
  EXPECT_TRUE(enable_rules(ids).empty()) << "the rule was already enabled";
}

}  // namespace
}  // namespace weft::fused
