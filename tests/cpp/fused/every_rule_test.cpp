#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/tensor.h>

#include <thread>

#include "tests/cpp/fuser/testing.h"
#include "weft/fused/rules.h"
#include "weft/fuser/autograd.h"
#include "weft/fuser/call_validation.h"
#include "weft/fuser/explain.h"
#include "weft/ops/constant_scale.h"

namespace weft::fused {
namespace {

using fuser::Fuser;
using fuser::Pipeline;
using weft::testing::expect_close;
using weft::testing::leaf;

Pipeline sample(const PatternRule& rule) {
  std::vector<fuser::Stage> stages;
  for (auto& op : rule.sample()) stages.push_back({.op = op});
  return Pipeline(std::move(stages));
}

constexpr int64_t kRows = 17;  // at least min_rows of every rule

/// Extra inputs of a sample: as many columns as the output of its last GEMM, or as x.
fuser::Tensors extras_for(const Pipeline& pipeline, int64_t rows) {
  int64_t width = 8;
  for (const auto& spec : pipeline.params())
    if (spec.shape.size() == 2) width = spec.shape[0];
  fuser::Tensors extras;
  for (const int slot : pipeline.caller_inputs()) {
    const auto& op = pipeline.op(pipeline.consumer(slot));
    const int extra = slot - pipeline.extra_in_base(pipeline.consumer(slot));
    const bool grouped = op.name() == "GroupedLinear" || op.name().substr(0, 6) == "Scaled";
    if (op.name() == "CrossEntropy")
      extras.push_back(at::arange(rows));
    else if (op.is_index(extra))
      extras.push_back(at::tensor({rows - 1, int64_t{0}, int64_t{1}}));
    else
      extras.push_back(grouped ? leaf({rows}) : leaf({rows, width}));
  }
  return extras;
}

/// Outputs and all gradients of a pipeline planned with `rules`.
std::vector<at::Tensor> results(const Pipeline& pipeline, const RuleList& rules, const at::Tensor& x,
                                const std::vector<at::Tensor>& params, const fuser::Tensors& extras,
                                const std::vector<at::Tensor>& grads) {
  const auto plan = fuser::make_plan(pipeline, fuser::make_plan_key(pipeline, x, params, extras, 0), rules);
  const auto shared = std::make_shared<const Pipeline>(pipeline);
  at::manual_seed(0);
  const auto outputs = fuser::run_plan(shared, plan, x, params, extras);
  std::vector<at::Tensor> inputs{x}, all(outputs.begin(), outputs.end());
  inputs.insert(inputs.end(), params.begin(), params.end());
  for (const auto& extra : extras)
    if (extra.requires_grad()) inputs.push_back(extra);
  for (auto& g : torch::autograd::grad(all, inputs, grads, true, false, true)) all.push_back(g);
  return all;
}

RuleList only(const PatternRule& rule) { return {{0, rule}}; }

class EveryRule : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    if (!rule().sample) GTEST_SKIP() << rule().name << " needs ranks: tests/dist/test_overlap.py";
  }
  const PatternRule& rule() const { return std::get<PatternRule>((*list_)[GetParam()].second); }
  std::shared_ptr<const RuleList> list_ = all_rules();
};

TEST_P(EveryRule, FusesItsWholeSample) {
  const auto pipeline = sample(rule());
  const auto params = weft::testing::parameters(pipeline);
  const auto x = leaf({kRows, 8});
  const auto extras = extras_for(pipeline, kRows);
  const auto plan = fuser::make_plan(pipeline, fuser::make_plan_key(pipeline, x, params, extras, 0), only(rule()));
  const auto& steps = rule().make.pass == Pass::backward ? plan->backward : plan->forward;
  ASSERT_EQ(steps.size(), 1) << rule().name << " left part of its sample unfused";
  EXPECT_TRUE(plan->rejections.empty());
}

TEST_P(EveryRule, MatchesUnfusedValuesAndGradients) {
  const auto pipeline = sample(rule());
  const auto params = weft::testing::parameters(pipeline);
  for (const int64_t rows : {int64_t{3}, kRows}) {
    const auto x = leaf({rows, 8});
    const auto extras = extras_for(pipeline, rows);
    Fuser probe(pipeline);
    std::vector<at::Tensor> grads;
    for (const auto& y : probe(x, params, extras)) grads.push_back(at::randn_like(y));
    const auto fused = results(pipeline, only(rule()), x, params, extras, grads);
    const auto plain = results(pipeline, {}, x, params, extras, grads);
    for (size_t i = 0; i < plain.size(); ++i)
      expect_close(fused[i], plain[i], rule().name + " result " + std::to_string(i));
  }
}

INSTANTIATE_TEST_SUITE_P(Builtin, EveryRule, ::testing::Range(size_t{0}, all_rules()->size()),
                         [](const auto& info) { return name_of((*all_rules())[info.param].second); });

TEST(Rules, AddAndRemoveTakeEffectAtNextCall) {
  Fuser fuser(Pipeline::parse("ConstantScale(scale=2.0); ConstantScale(scale=3.0)"));
  const auto x = leaf({2, 2});
  EXPECT_EQ(fuser.plan(x, {}, {})->forward.size(), 2);
  struct Six final : ForwardFusion {
    explicit Six(const Match&) {}
    at::Tensor forward(StepContext&, const at::Tensor& x) const override { return x * 6; }
  };
  const Element any{[](const ops::BasicOp& op) { return op.name() == "ConstantScale"; }};
  const auto id = add_rule(PatternRule{.name = "six", .pattern = {any, any}, .make = make_fused<Six>(), .min_rows = 3});
  EXPECT_EQ(fuser.plan(x, {}, {})->forward.size(), 1);
  expect_close(fuser(x, {}, {})[0], x * 6, "below min_rows the basic operations run");
  expect_close(fuser(at::ones({5, 2}, at::kDouble), {}, {})[0], at::full({5, 2}, 6, at::kDouble), "six");
  remove_rule(id);
  EXPECT_EQ(fuser.plan(x, {}, {})->forward.size(), 2);
}

struct ReportsRows final : ForwardFusion {
  explicit ReportsRows(const Match&) {}
  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    ctx.report(std::to_string(x.size(0)) + " rows");
    return x * 2;
  }
};

TEST(Rules, ExplainPrintsReportOfLastCall) {
  Fuser fuser(Pipeline::parse("ConstantScale(scale=2.0)"));
  const auto id = add_rule(
      PatternRule{.name = "reports", .pattern = {one<ops::ConstantScale>()}, .make = make_fused<ReportsRows>()});
  const auto x = leaf({2, 2});
  const auto note = [&] { return fuser::explain(fuser, x, {}, {}).forward[0].note; };
  EXPECT_EQ(note(), "");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { fuser(leaf({5, 2}), {}, {}); });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(note(), "5 rows");
  fuser(x, {}, {});
  EXPECT_EQ(note(), "2 rows");
  EXPECT_EQ(fuser::explain(fuser, x, {}, {}).backward[0].note, "");
  remove_rule(id);
  EXPECT_EQ(note(), "") << "another rule created the step";
}

TEST(Rules, RewriteMustImplementItsPass) {
  Fuser fuser(Pipeline::parse("ConstantScale(scale=2.0)"));
  const auto id = add_rule(RewriteRule{"backward_only", Pass::backward, [](auto steps, const PlanView&) {
                                         const Match none(0, {}, {});
                                         steps[0].fused = std::make_shared<const ReportsRows>(none);
                                         return steps;
                                       }});
  EXPECT_THROW(fuser(leaf({2, 2}), {}, {}), c10::Error);
  remove_rule(id);
}

}  // namespace
}  // namespace weft::fused
