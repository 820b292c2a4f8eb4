#include "weft/fuser/fuser.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>

#include <thread>

#include "tests/cpp/fuser/testing.h"
#include "weft/core/ownership.h"

namespace weft::fuser {
namespace {

using weft::testing::expect_close;
using weft::testing::grad;
using weft::testing::leaf;
using weft::testing::parameters;

Fuser make(const std::string& text) { return Fuser(Pipeline::parse(text)); }

TEST(Fuser, TwoLinearsMatchTorch) {
  auto fuser =
      make("BasicLinear(in_features=4, out_features=6); Bias(size=6); BasicLinear(in_features=6, out_features=3)");
  const auto p = parameters(fuser.pipeline());
  const auto x = leaf({5, 4}), dy = at::randn({5, 3}, at::kDouble);
  const auto y = fuser(x, p, {})[0], plain = at::addmm(p[1], x, p[0].t()).mm(p[2].t());
  expect_close(y, plain, "y");
  const std::vector<at::Tensor> inputs{x, p[0], p[1], p[2]};
  const auto got = grad(y, inputs, dy), expected = grad(plain, inputs, dy);
  for (size_t i = 0; i < inputs.size(); ++i) expect_close(got[i], expected[i], "gradient " + std::to_string(i));
}

template <class Error>
std::string error_of(const std::string& text, const at::Tensor& x) {
  auto fuser = make(text);
  try {
    fuser(x, parameters(fuser.pipeline()), {});
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing raised";
}

TEST(Fuser, ErrorsNameTheOperation) {
  const auto x = at::ones({5, 4}, at::kDouble);
  const std::string bias =
      "operation 1 (Bias): input has shape [5, 4], expected last dimension 3, the size of the bias.";
  EXPECT_EQ(error_of<c10::ValueError>("GELU(); Bias(size=3)", x), bias);
  EXPECT_EQ(error_of<c10::ValueError>("BasicLinear(in_features=4, out_features=4); Bias(size=3)", x), bias);  // fused
  EXPECT_EQ(
      error_of<c10::TypeError>("Identity(); GELU()", x.to(at::kLong)),
      "operation 1 (GELU): input is int64, expected float32, float64, float16 or bfloat16. Convert it first, e.g. "
      "with .float().");
  EXPECT_EQ(error_of<c10::ValueError>("SwiGLU()", at::ones({5, 3}, at::kDouble)),
            "SwiGLU: input has 3 columns, expected an even number.");
}

/// If a gradient buffer is overwritten before the wgrad GEMM has read it, dx is right but dW is wrong.
TEST(Fuser, InPlaceBranchPreservesWeightGradient) {
  auto fuser = make(
      "MakeExtraOutput(in_place=true) >>\"r\"; BasicLinear(in_features=4, out_features=4); "
      "AddExtraInput(in_place=true) <\"r\"");
  const auto p = parameters(fuser.pipeline());
  const auto x = leaf({5, 4}), before = x.detach().clone(), dy = at::randn({5, 4}, at::kDouble), dy_before = dy.clone();
  const auto y = fuser(x, p, {})[0], plain = x.mm(p[0].t()) + x;
  const auto got = grad(y, {x, p[0]}, dy), expected = grad(plain, {x, p[0]}, dy);
  expect_close(y, plain, "y");
  expect_close(got[0], expected[0], "dx");
  expect_close(got[1], expected[1], "dW");
  EXPECT_TRUE(x.equal(before)) << "the caller's input was changed";
  EXPECT_TRUE(dy.equal(dy_before)) << "the caller's gradient was changed";
}

TEST(Fuser, ChannelReadTwiceSumsGradients) {
  for (const std::string in_place : {"false", "true"}) {
    const auto join = "AddExtraInput(in_place=" + in_place + ") <\"r\"";
    auto fuser =
        make("MakeExtraOutput(in_place=" + in_place + ") >>\"r\"; BasicLinear(in_features=4, out_features=4); " + join +
             "; SiLU(); BasicLinear(in_features=4, out_features=4); " + join);
    const auto p = parameters(fuser.pipeline());
    const auto x = leaf({5, 4}), dy = at::randn({5, 4}, at::kDouble), dy_before = dy.clone();
    const auto y = fuser(x, p, {})[0], h = x.mm(p[0].t()) + x, plain = (h * h.sigmoid()).mm(p[1].t()) + x;
    expect_close(y, plain, "y");
    const auto got = grad(y, {x, p[0], p[1]}, dy), expected = grad(plain, {x, p[0], p[1]}, dy);
    for (size_t i = 0; i < expected.size(); ++i) expect_close(got[i], expected[i], "gradient " + std::to_string(i));
    EXPECT_TRUE(dy.equal(dy_before)) << "the caller's gradient was changed";
  }
}

TEST(Fuser, ReusesOnlyDonatedExtraInput) {
  auto fuser = make("AddExtraInput(in_place=true) <-");
  const auto x = at::ones({3, 4});
  auto given = at::randn({3, 4});
  const auto* memory = given.data_ptr();
  const auto sum = given + x;
  Tensors extras;
  extras.push_back(std::move(given));
  const auto reused = fuser(x, {}, std::move(extras))[0];
  EXPECT_EQ(reused.data_ptr(), memory);
  EXPECT_TRUE(reused.equal(sum));

  const auto held = at::randn({3, 4}), before = held.clone();
  const auto fresh = fuser(x, {}, {held})[0];
  EXPECT_NE(fresh.data_ptr(), held.data_ptr());
  EXPECT_TRUE(held.equal(before));
}

TEST(Fuser, LiveViewPreventsReuse) {
  auto fuser = make("AddExtraInput(in_place=true) <-");
  auto given = at::randn({3, 4});
  const auto view = given.narrow(0, 0, 1), before = view.clone();
  Tensors extras;
  extras.push_back(std::move(given));
  fuser(at::ones({3, 4}), {}, std::move(extras));
  EXPECT_TRUE(view.equal(before));
}

TEST(Fuser, RowCountDoesNotReplan) {
  auto fuser = make("BasicLinear(in_features=4, out_features=4); GELU()");
  const auto p = parameters(fuser.pipeline());
  fuser(leaf({1, 4}), p, {});
  for (int rows = 0; rows < 1000; ++rows) fuser(leaf({rows, 4}), p, {});
  EXPECT_EQ(fuser.plans_made(), 1);
}

TEST(Fuser, BoundsCachedPlans) {
  std::string text = "Dropout(p=0.5)";
  for (int i = 0; i < 5; ++i) text += "; Dropout(p=0.5)";
  auto fuser = make(text);
  for (uint64_t mask = 0; mask < 64; ++mask) fuser(leaf({2, 2}), {}, {}, mask);
  EXPECT_EQ(fuser.plans_made(), 64);
  EXPECT_LE(fuser.plans_kept(), 16);
}

TEST(Fuser, ComputesNoGradientForFrozenTensors) {
  auto fuser = make("BasicLinear(in_features=4, out_features=4); BasicLinear(in_features=4, out_features=4)");
  auto p = parameters(fuser.pipeline());
  p[0].requires_grad_(false);
  const auto x = at::randn({2, 4}, at::kDouble);
  const auto plan = fuser.plan(x, p, {});
  EXPECT_FALSE(plan->ops[0].needs_grad);
  EXPECT_FALSE(plan->ops[1].needs_input_grad) << "nothing before the second linear needs a gradient";
  const auto y = fuser(x, p, {})[0];
  torch::autograd::backward({y}, {at::ones_like(y)});
  EXPECT_FALSE(p[0].grad().defined());
  EXPECT_TRUE(p[1].grad().defined());
}

TEST(Fuser, MakesNoNodeWithoutRequiresGrad) {
  auto fuser = make("GELU()");
  EXPECT_FALSE(fuser(at::randn({2, 2}), {}, {})[0].requires_grad());
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(fuser(leaf({2, 2}), {}, {})[0].requires_grad());
}

TEST(Fuser, BackwardTwiceNeedsRetainGraph) {
  auto fuser = make("GELU()");
  const auto x = leaf({2, 2});
  const auto y = fuser(x, {}, {})[0], g = at::ones_like(y);
  torch::autograd::backward({y}, {g}, /*retain_graph=*/true);
  const auto once = x.grad().clone();
  torch::autograd::backward({y}, {g});
  expect_close(x.grad(), once * 2, "accumulated gradient");
  EXPECT_ANY_THROW(torch::autograd::backward({y}, {g}));
}

TEST(Fuser, RaisesIfSavedTensorWasModified) {
  auto fuser = make("GELU()");
  const auto x = leaf({2, 2});
  const auto h = x * 1;
  const auto y = fuser(h, {}, {})[0];
  h.add_(1);
  EXPECT_ANY_THROW(torch::autograd::backward({y}, {at::ones_like(y)}));
}

TEST(Fuser, RaisesOnDoubleBackward) {
  auto fuser = make("GELU()");
  const auto x = leaf({2, 2});
  const auto y = fuser(x, {}, {})[0];
  const auto dx = torch::autograd::grad({y}, {x}, {at::ones_like(y)}, true, /*create_graph=*/true)[0];
  try {
    torch::autograd::grad({dx}, {x}, {at::ones_like(dx)});
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("differentiating twice"));
  }
}

TEST(Fuser, IsThreadSafe) {
  auto fuser = make("BasicLinear(in_features=4, out_features=4); GELU(); Dropout(p=0.0)");
  const auto p = parameters(fuser.pipeline());
  const auto x = at::randn({3, 4}, at::kDouble);
  const auto expected = fuser(x, p, {})[0].detach();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) {
        c10::AutoGradMode mode(t % 2 == 0);
        const auto y = fuser(x, p, {}, i % 2)[0];
        if (!y.detach().equal(expected)) ++wrong;
        if (t % 2 == 0) grad(y, {p[0]}, at::ones_like(y));
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Fuser, RejectsInvalidInputs) {
  auto fuser = make("AddExtraInput() <-");
  EXPECT_THROW(fuser(at::ones({2}), {}, {}), c10::ValueError);
  EXPECT_THROW(fuser(at::Tensor(), {}, {at::ones({2})}), c10::ValueError);
  EXPECT_THROW(fuser(at::ones({2}).to_sparse(), {}, {at::ones({2})}), c10::TypeError);
}

}  // namespace
}  // namespace weft::fuser
