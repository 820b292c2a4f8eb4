#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <thread>

#include "weft/core/weak_tensor_map.h"
#include "weft/nn/sequential.h"
#include "weft/ops/basic_linear.h"
#include "weft/ops/constant_scale.h"
#include "weft/ops/make_extra_output.h"
#include "weft/ops/norm.h"
#include "weft/ops/wgrad_attrs.h"
#include "weft/ops/wgrad_queue.h"
#include "weft/ops/wgrad_sink.h"

namespace weft::ops {
namespace {

constexpr double kFill = 0.5;
constexpr int64_t kWidth = 12, kTokens = 18;  // kTokens: at least min_rows of every rule

/// A row of the decision table in weft/ops/wgrad_sink.h: which conditions hold.
struct Row {
  int number;
  bool accumulate, delay, flag, overwrite;
};

enum class Shape { linear, linear_add, linear_scale, block };
struct Case {
  Row row;
  Shape shape;
  at::ScalarType weight, main_grad;
};

nn::Linear linear(const Case& c, bool plain) {
  return nn::Linear(nn::LinearOptions{.in_features = kWidth,
                                      .out_features = kWidth,
                                      .bias = c.shape == Shape::linear,
                                      .dtype = c.weight,
                                      .accumulate_into_main_grad = !plain && c.row.accumulate,
                                      .delay_wgrad_compute = !plain && c.row.delay});
}

nn::Sequential model(const Case& c, bool plain) {
  switch (c.shape) {
    case Shape::linear:
      return nn::Sequential(linear(c, plain));
    case Shape::linear_add:
      return nn::Sequential(nn::op<MakeExtraOutput>({.in_place = true}), linear(c, plain));
    case Shape::linear_scale:
      return nn::Sequential(linear(c, plain), nn::op<ConstantScale>({.scale = 0.75}));
    case Shape::block:
      break;
  }
  auto fork = nn::op<MakeExtraOutput>({.in_place = true});
  auto join = nn::op("AddExtraInput");
  fork->set_extra_output_channel(0, "residual", /*output_to_caller=*/false);
  join->set_extra_input_channel(0, "residual");
  auto norm = nn::op<RMSNorm>({.normalized_shape = {kWidth}, .dtype = c.weight});
  return nn::Sequential(fork, norm, linear(c, plain), nn::op("GELU"), linear(c, plain), join);
}

std::vector<at::Tensor> weights(nn::Sequential& m) {
  std::vector<at::Tensor> list;
  for (size_t i = 0; i < m->size(); ++i)
    if (auto found = std::dynamic_pointer_cast<nn::LinearImpl>((*m)[i])) list.push_back(found->parameters()[0]);
  return list;
}

void run_backward(nn::Sequential& m, const at::Tensor& x) {
  auto outputs = m->forward_extra(x, {});
  at::Tensor loss = outputs[0].to(at::kFloat).square().sum();
  for (size_t k = 1; k < outputs.size(); ++k) loss = loss + outputs[k].to(at::kFloat).sum();
  loss.backward();
}

bool shares(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.storage().is_alias_of(b.storage());
}

class WgradRow : public ::testing::TestWithParam<Case> {
 protected:
  /// The tested model, and a twin without the options, whose .grad is the expected result.
  void SetUp() override {
    const auto& c = GetParam();
    x_ = at::randn({kTokens, kWidth}).to(c.weight).requires_grad_();
    twin_ = model(c, /*plain=*/true);
    tested_ = model(c, /*plain=*/false);
    const at::NoGradGuard no_grad;
    auto from = twin_->parameters(), to = tested_->parameters();
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    for (const auto& w : weights(tested_)) {
      if (!c.row.accumulate) continue;
      auto& attrs = wgrad_attrs(w);
      attrs.main_grad = at::full(w.sizes(), c.row.overwrite ? NAN : kFill, c.main_grad);
      attrs.overwrite_main_grad = c.row.overwrite;
      if (c.row.flag) attrs.grad_added_to_main_grad = false;
    }
  }

  void expect_gradients() {
    const auto& c = GetParam();
    const auto twin = weights(twin_), got = weights(tested_);
    const double tolerance = c.weight == at::kBFloat16 ? 0.03 : 1e-5;
    for (size_t i = 0; i < got.size(); ++i) {
      auto expected = twin[i].grad().to(at::kDouble);
      if (c.row.accumulate && !c.row.overwrite) expected = expected + kFill;
      const auto& place = c.row.accumulate ? wgrad_attrs(got[i]).main_grad : got[i].grad();
      EXPECT_TRUE(place.to(at::kDouble).allclose(expected, tolerance, tolerance * expected.abs().max().item<double>()));
      EXPECT_FALSE(shares(got[i].grad(), place) && c.row.accumulate);
    }
  }

  at::Tensor x_;
  nn::Sequential twin_{nullptr}, tested_{nullptr};
};

TEST_P(WgradRow, WritesGradientToItsSink) {
  const auto& row = GetParam().row;
  std::vector<at::Tensor> before;
  for (const auto& w : weights(tested_))
    if (row.accumulate) before.push_back(wgrad_attrs(w).main_grad.clone());
  run_backward(twin_, x_);
  run_backward(tested_, x_);

  for (size_t i = 0; i < weights(tested_).size(); ++i) {
    const auto w = weights(tested_)[i];
    const bool gets_grad = row.accumulate ? row.flag : !row.delay;
    EXPECT_EQ(w.grad().defined(), gets_grad);
    EXPECT_EQ(pending_dw(w), row.delay ? 1 : 0);
    if (row.accumulate && row.flag) {
      EXPECT_EQ(wgrad_attrs(w).grad_added_to_main_grad, std::optional(true));
      EXPECT_EQ(w.grad().data_ptr(), dummy_gradient(w, false).data_ptr());
    }
    if (row.accumulate && row.delay) {
      EXPECT_TRUE(wgrad_attrs(w).main_grad.equal(before[i]) || row.overwrite);
      EXPECT_EQ(wgrad_attrs(w).main_grad.isnan().all().item<bool>(), row.overwrite);
    }
    if (row.accumulate && !row.flag) {
      EXPECT_FALSE(wgrad_attrs(w).grad_added_to_main_grad.has_value());
    }
  }
  int hooks = 0, sequential_hooks = 0;
  tested_->register_wgrad_accumulation_and_reduce_hooks([&] { ++sequential_hooks; });
  for (size_t i = 0; i < tested_->size(); ++i)
    (*tested_)[i]->register_wgrad_accumulation_and_reduce_hooks([&] { ++hooks; });
  EXPECT_EQ(tested_->need_backward_dw(), row.delay);
  EXPECT_EQ(tested_->backward_dw(), row.delay);
  EXPECT_EQ(hooks, row.delay ? weights(tested_).size() : 0);
  EXPECT_FALSE(tested_->backward_dw());
  EXPECT_EQ(hooks, row.delay ? weights(tested_).size() : 0) << "no gradient is pending any more";
  EXPECT_EQ(sequential_hooks, row.delay ? 1 : 0);
  expect_gradients();
}

TEST_P(WgradRow, FrozenWeightNeedsNoMainGrad) {
  for (auto& w : weights(tested_)) {
    w.set_requires_grad(false);
    if (find_wgrad_attrs(w)) wgrad_attrs(w).main_grad.reset();
  }
  run_backward(tested_, x_);
  EXPECT_TRUE(x_.grad().defined());
  for (const auto& w : weights(tested_)) {
    EXPECT_FALSE(w.grad().defined());
    EXPECT_EQ(pending_dw(w), 0);
    const auto* attrs = find_wgrad_attrs(w);
    if (attrs && attrs->grad_added_to_main_grad) {
      EXPECT_FALSE(*attrs->grad_added_to_main_grad);
    }
  }
  tested_->backward_dw();
}

std::vector<Case> cases() {
  const std::vector<Row> rows = {{1, false, false, false, false}, {2, false, true, false, false},
                                 {3, true, false, false, false},  {4, true, false, false, true},
                                 {5, true, false, true, false},   {6, true, false, true, true},
                                 {7, true, true, false, false},   {8, true, true, false, true},
                                 {9, true, true, true, false},    {10, true, true, true, true}};
  std::vector<Case> list;
  for (const auto& row : rows)
    for (const auto shape : {Shape::linear, Shape::linear_add, Shape::linear_scale, Shape::block}) {
      list.push_back({row, shape, at::kFloat, at::kFloat});
      list.push_back({row, shape, at::kBFloat16, at::kFloat});
      list.push_back({row, shape, at::kBFloat16, at::kBFloat16});
    }
  return list;
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  static constexpr const char* kShapes[] = {"linear", "linear_add", "linear_scale", "block"};
  return "row" + std::to_string(info.param.row.number) + "_" + kShapes[static_cast<int>(info.param.shape)] + "_" +
         c10::toString(info.param.weight) + "_" + c10::toString(info.param.main_grad);
}

INSTANTIATE_TEST_SUITE_P(Wgrad, WgradRow, ::testing::ValuesIn(cases()), case_name);

/// A linear that accumulates into main_grad, with its attributes set.
nn::Linear accumulating(bool delay = false) {
  nn::Linear made(nn::LinearOptions{.in_features = 4,
                                    .out_features = 3,
                                    .bias = false,
                                    .accumulate_into_main_grad = true,
                                    .delay_wgrad_compute = delay});
  wgrad_attrs(made->parameters()[0]).main_grad = at::full({3, 4}, kFill);
  return made;
}

TEST(Wgrad, MainGradIsFetchedWhenGradientIsComputed) {
  for (const bool delay : {false, true}) {
    auto module = accumulating(delay);
    const auto weight = module->parameters()[0];
    auto& attrs = wgrad_attrs(weight);
    std::vector<at::Tensor> buckets;
    attrs.main_grad.reset();
    attrs.get_main_grad = [&] { return buckets.emplace_back(at::full({3, 4}, kFill)); };
    for (size_t step = 0; step < 2; ++step) {
      const auto y = module->forward(at::ones({2, 4}));
      EXPECT_EQ(buckets.size(), step);
      y.sum().backward();
      EXPECT_EQ(buckets.size(), step + (delay ? 0 : 1));
      module->backward_dw();
      EXPECT_EQ(buckets.size(), step + 1);
      EXPECT_TRUE(buckets.back().equal(at::full({3, 4}, kFill + 2)));
      EXPECT_TRUE(attrs.main_grad.is_same(buckets.back()));
    }
  }
}

TEST(Wgrad, InvalidMainGradRaisesAndChangesNothing) {
  auto module = accumulating();
  auto& attrs = wgrad_attrs(module->parameters()[0]);
  attrs.grad_added_to_main_grad = false;
  const std::vector<at::Tensor> bad = {{},
                                       at::full({4, 3}, kFill).t(),
                                       at::full({3, 8}, kFill).narrow(1, 0, 4),
                                       at::full({3, 5}, kFill),
                                       at::full({3, 4}, 1, at::kInt)};
  for (const auto& main_grad : bad) {
    attrs.main_grad = main_grad;
    const auto before = main_grad.defined() ? main_grad.clone() : at::Tensor();
    EXPECT_THROW(module->forward(at::ones({2, 4})).sum().backward(), c10::Error);
    EXPECT_EQ(attrs.grad_added_to_main_grad, std::optional(false));
    if (before.defined()) {
      EXPECT_TRUE(main_grad.equal(before));
    }
  }
}

TEST(Wgrad, WeightUsedTwiceIsOverwrittenOnce) {
  auto shared = nn::Linear(
      nn::LinearOptions{.in_features = 4, .out_features = 4, .bias = false, .accumulate_into_main_grad = true});
  auto& attrs = wgrad_attrs(shared->parameters()[0]);
  attrs.main_grad = at::full({4, 4}, NAN);
  attrs.overwrite_main_grad = true;
  const auto x = at::randn({2, 4});
  shared->forward(shared->forward(x)).sum().backward();
  auto plain = at::Tensor(shared->parameters()[0].detach().clone()).requires_grad_();
  x.matmul(plain.t()).matmul(plain.t()).sum().backward();
  EXPECT_TRUE(attrs.main_grad.allclose(plain.grad(), 1e-5, 1e-5));
}

TEST(Wgrad, TwoThreadsLoseNoGradient) {
  auto module = accumulating();
  constexpr int kRounds = 200;
  const auto work = [&] {
    for (int i = 0; i < kRounds; ++i) module->forward(at::ones({1, 4})).sum().backward();
  };
  std::thread first(work), second(work);
  first.join();
  second.join();
  EXPECT_TRUE(wgrad_attrs(module->parameters()[0]).main_grad.equal(at::full({3, 4}, kFill + 2 * kRounds)));
}

TEST(Wgrad, QueuePopsOldestBackwardAndDetectsWrites) {
  WgradQueue queue;
  EXPECT_NO_THROW(queue.assert_empty());
  EXPECT_THROW(queue.pop_oldest(), c10::Error);
  for (const int task : {7, 9, 7})
    queue.push({.dy = at::ones({1, 1}), .x = at::ones({1, 1}), .scale = 1.0 * task, .graph_task_id = task});
  EXPECT_THROW(queue.assert_empty(), c10::Error);
  EXPECT_EQ(queue.num_backwards(), 2);
  const auto oldest = queue.pop_oldest();
  ASSERT_EQ(oldest.size(), 2);
  EXPECT_EQ(oldest[0].scale + oldest[1].scale, 14);
  EXPECT_EQ(queue.pop_oldest().at(0).scale, 9);
  const auto x = at::ones({1, 1});
  queue.push({.dy = at::ones({1, 1}), .x = x});
  x.fill_(3);
  EXPECT_THROW(queue.pop_oldest(), c10::Error);
}

TEST(Wgrad, AttrsFollowTheirParameter) {
  std::weak_ptr<int> gone;
  {
    const auto first = at::ones({2}), second = at::ones({2});
    auto value = std::make_shared<int>(1);
    gone = value;
    wgrad_attrs(first).get_main_grad = [value] { return at::Tensor(); };
    EXPECT_EQ(find_wgrad_attrs(second), nullptr);
    EXPECT_EQ(find_wgrad_attrs(first.detach()), nullptr);
    EXPECT_NE(find_wgrad_attrs(first), nullptr);
  }
  EXPECT_FALSE(gone.expired());
  for (int i = 0; i < 100; ++i) {
    const auto other = at::ones({2});
    EXPECT_EQ(find_wgrad_attrs(other), nullptr) << "a reused address";
    wgrad_attrs(other);
  }
  EXPECT_TRUE(gone.expired());
}

TEST(Wgrad, EqualParametersShareOneDummy) {
  const auto a = at::ones({2, 3}).requires_grad_(), b = at::ones({2, 3}).requires_grad_();
  const auto transposed = at::ones({3, 2}).t();
  EXPECT_EQ(dummy_gradient(a, false).data_ptr(), dummy_gradient(b, true).data_ptr());
  EXPECT_FALSE(dummy_gradient(a, false).is_same(dummy_gradient(a, false)));
  EXPECT_EQ(dummy_gradient(transposed, false).strides(), transposed.strides());
  dummy_gradient(a, false).fill_(7);
  EXPECT_TRUE(dummy_gradient(b, true).eq(0).all().item<bool>());
}

}  // namespace
}  // namespace weft::ops
