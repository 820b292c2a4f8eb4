#include "weft/kernels/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

namespace weft::kernels {
namespace {

using at::Tensor;
using Scalar = std::function<double(double)>;

double sigma(double x) { return 1 / (1 + std::exp(-x)); }
double gelu(double x) { return x * (0.5 + 0.5 * std::tanh(x * (0.7978845608028654 + 0.03567740813637308 * x * x))); }
double qgelu(double x) { return x * sigma(1.702 * x); }
double relu(double x) { return x > 0 ? x : 0; }
double srelu(double x) { return relu(x) * relu(x); }
double silu(double x) { return x * sigma(x); }
double same(double x) { return x; }

struct FormulaCase {
  Act act;
  Scalar f, h;  // y = f(x), or f(a)·h(b)
};

std::vector<FormulaCase> cases() {
  return {{{ActKind::gelu}, gelu, {}},
          {{ActKind::gelu_erf}, [](double x) { return x / 2 * std::erfc(-x / std::sqrt(2)); }, {}},
          {{ActKind::qgelu}, qgelu, {}},
          {{ActKind::relu}, relu, {}},
          {{ActKind::srelu}, srelu, {}},
          {{.kind = ActKind::tanh_srelu, .beta1 = 3}, [](double x) { return srelu(3 * std::tanh(x / 3)); }, {}},
          {{ActKind::silu}, silu, {}},
          {{ActKind::glu}, sigma, same},
          {{ActKind::geglu}, gelu, same},
          {{ActKind::qgeglu}, qgelu, same},
          {{ActKind::reglu}, relu, same},
          {{ActKind::sreglu}, srelu, same},
          {{ActKind::swiglu}, silu, same},
          {{.kind = ActKind::situglu, .beta1 = 3, .beta2 = 12},
           [](double a) { return 3 * std::tanh(a / 3) * sigma(a); },
           [](double b) { return 12 * std::tanh(b / 12); }},
          {{.kind = ActKind::clamped_swiglu, .limit = 0.75, .alpha = 1.3, .offset = 0.5},
           [](double a) { return std::min(a, 0.75) * sigma(1.3 * std::min(a, 0.75)); },
           [](double b) { return std::clamp(b, -0.75, 0.75) + 0.5; }}};
}

Tensor map(const Tensor& x, const Scalar& f) {
  auto y = x.contiguous().clone();
  for (int64_t i = 0; i < y.numel(); ++i) y.mutable_data_ptr<double>()[i] = f(y.const_data_ptr<double>()[i]);
  return y;
}

TEST(Activation, MatchesFormula) {
  const auto x = at::randn({5, 12}, at::kDouble) * 2;
  for (const auto& [act, f, h] : cases()) {
    SCOPED_TRACE(static_cast<int>(act.kind));
    const auto y = activation_forward(act, x);
    const auto expected = act.gated() ? map(x.narrow(1, 0, 6), f) * map(x.narrow(1, 6, 6), h) : map(x, f);
    EXPECT_TRUE(at::allclose(y, expected, 1e-12, 1e-12)) << y << expected;
  }
}

TEST(Activation, InterleavedMatchesReorderedHalves) {
  const auto a = at::randn({2, 3, 12}, at::kDouble), b = at::randn({2, 3, 12}, at::kDouble);
  const auto dy = at::randn({2, 3, 12}, at::kDouble);
  const auto blocks = [](const Tensor& t) { return t.view({2, 3, 3, 4}); };
  const auto mixed = at::stack({blocks(a), blocks(b)}, 3).view({2, 3, 24});
  const auto halves = at::stack({a, b}, 2).view({2, 3, 24});
  for (auto [act, f, h] : cases()) {
    if (!act.gated()) continue;
    const auto y = activation_forward(act, halves);
    const auto dx = activation_backward(act, dy, halves);
    act.interleave = 4;
    EXPECT_TRUE(at::allclose(activation_forward(act, mixed), y, 1e-12, 1e-12));
    const auto da = blocks(dx.narrow(2, 0, 12).contiguous()), db = blocks(dx.narrow(2, 12, 12).contiguous());
    EXPECT_TRUE(
        at::allclose(activation_backward(act, dy, mixed), at::stack({da, db}, 3).view({2, 3, 24}), 1e-12, 1e-12));
  }
}

/// A few values may differ from the rounded float32 result: the vector and scalar exp of ATen differ in the last place.
void expect_one_rounding(const Tensor& got, const Tensor& wide) {
  const auto wrong = got.ne(wide.to(got.scalar_type())).sum().item<int64_t>();
  EXPECT_LE(wrong, got.numel() / 500);
}

TEST(Activation, RoundsLowPrecisionOnce) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto x = at::randn({64, 64}).to(dtype), scales = at::randn({64});
    const auto wide = x.to(at::kFloat);
    for (const auto& [act, f, h] : cases()) {
      SCOPED_TRACE(static_cast<int>(act.kind));
      const auto y = activation_forward(act, wide);
      const auto dy = at::randn(y.sizes()).to(dtype);
      expect_one_rounding(activation_forward(act, x), y);
      expect_one_rounding(activation_backward(act, dy, x), activation_backward(act, dy.to(at::kFloat), wide));
      expect_one_rounding(scaled_activation_forward(act, x, scales), y * scales.unsqueeze(1));
    }
  }
}

TEST(Activation, ClampGradientIncludesBounds) {
  const Act act{.kind = ActKind::clamped_swiglu, .limit = 0.75};
  const auto a = at::tensor({0.75, 0.7500001, -9.0, 0.1}, at::kDouble),
             b = at::tensor({0.75, 0.8, -0.75, -0.76}, at::kDouble);
  const auto dx = activation_backward(act, at::randn({4}, at::kDouble), at::stack({a, b}).view({8}));
  EXPECT_TRUE(at::equal(dx.ne(0), at::tensor({1, 0, 1, 1, 1, 0, 1, 0}).to(at::kBool))) << dx;
}

TEST(ScaledActivation, ScaleGradientKeepsDtypeAndShape) {
  const auto x = at::randn({2, 3, 8}).to(at::kBFloat16), dy = at::randn({2, 3, 4}).to(at::kBFloat16);
  const Act act{.kind = ActKind::swiglu};
  for (const auto& scales : {at::randn({2, 3}), at::randn({6}, at::kDouble)}) {
    const auto [dx, ds] = scaled_activation_backward(act, dy, x, scales, true, true);
    EXPECT_EQ(dx.scalar_type(), at::kBFloat16);
    EXPECT_EQ(ds.scalar_type(), scales.scalar_type());
    EXPECT_EQ(ds.sizes(), scales.sizes());
    const auto expected =
        (activation_forward(act, x.to(at::kFloat)) * dy.to(at::kFloat)).sum(-1).reshape(scales.sizes());
    EXPECT_TRUE(at::allclose(ds.to(at::kFloat), expected, 1e-5, 1e-6));
  }
}

}  // namespace
}  // namespace weft::kernels
