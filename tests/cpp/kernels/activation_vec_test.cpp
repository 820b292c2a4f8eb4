#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/special_erfc.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/cpp/kernels/compare.h"
#include "weft/kernels/activation.h"
#include "weft/kernels/tier.h"

namespace weft::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

/// clamp(x, low, high), whose derivative at the limits is 1; that of at::clamp is 0 since torch 2.14.
at::Tensor bounded(const at::Tensor& x, double low, double high) {
  return at::where((x >= low).logical_and(x <= high), x, at::clamp(x.detach(), low, high));
}

/// f in differentiable ATen operations.
at::Tensor f(const Act& act, const at::Tensor& x) {
  using enum ActKind;
  switch (act.kind) {
    case gelu:
    case geglu:
      return at::gelu(x, "tanh");
    case gelu_erf:
      return at::gelu(x, "none");
    case qgelu:
    case qgeglu:
      return x * at::sigmoid(x * 1.702);
    case relu:
    case reglu:
      return at::relu(x);
    case srelu:
    case sreglu:
      return at::relu(x) * at::relu(x);
    case tanh_srelu:
      return (at::tanh(at::relu(x) / act.beta1) * act.beta1).square();
    case silu:
    case swiglu:
      return x * at::sigmoid(x);
    case glu:
      return at::sigmoid(x);
    case situglu:
      return at::tanh(x / act.beta1) * at::sigmoid(x) * act.beta1;
    default:
      const auto gate = bounded(x, -kInf, act.limit);
      return gate * at::sigmoid(gate * act.alpha);
  }
}

at::Tensor h(const Act& act, const at::Tensor& b) {
  if (act.kind == ActKind::situglu) return at::tanh(b / act.beta2) * act.beta2;
  if (act.kind == ActKind::clamped_swiglu) return bounded(b, -act.limit, act.limit) + act.offset;
  return b;
}

at::Tensor formula(const Act& act, const at::Tensor& x) {
  if (!act.gated()) return f(act, x);
  const auto half = x.size(-1) / 2, size = act.interleave > 0 ? act.interleave : half;
  const auto blocks = x.unflatten(-1, {half / size, 2, size});
  return (f(act, blocks.select(-2, 0)) * h(act, blocks.select(-2, 1))).flatten(-2);
}

/// dx of Σ dy·act(x), by autograd in float64.
at::Tensor by_autograd(const Act& act, const at::Tensor& dy, const at::Tensor& x) {
  const auto leaf = exact(x).detach().requires_grad_(true);
  formula(act, leaf).backward(exact(dy));
  return leaf.grad();
}

at::Tensor column_sums(const at::Tensor& t) { return t.reshape({-1, t.size(-1)}).sum(0); }

/// Checks y, dx and the column sums of one kind on one input.
void check(const Act& act, const at::Tensor& x) {
  const auto y = activation_forward(act, x);
  const auto dy = values(y.sizes(), x.scalar_type());
  if (x.numel() == 0) {
    EXPECT_EQ(activation_backward(act, dy, x).sizes(), x.sizes());
    EXPECT_EQ(activation_backward_column_sums(act, dy, x).column_sums.abs().sum().item<double>(), 0);
    return;
  }
  expect_near(y, formula(act, exact(x)), 5);
  const auto dx = by_autograd(act, dy, x);
  expect_near(activation_backward(act, dy, x), dx, 10);
  expect_near(activation_backward(act, dy.to(at::kFloat), x), dx, 10);
  const auto [both_dx, sums] = activation_backward_column_sums(act, dy, x);
  EXPECT_TRUE(at::equal(both_dx, activation_backward(act, dy, x)));
  EXPECT_LE((exact(sums) - column_sums(dx)).abs().max().item<double>(), 0.05 * tolerance(x.scalar_type()) * 2000);
}

TEST(KernelsActivation, MatchesFormulaForEveryKindDtypeAndSize) {
  for (const auto& act : every_act())
    for (const auto dtype : kVectorDtypes)
      for (const auto width : kOddSizes) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(act.kind) << " " << dtype << " " << width);
        for (const int64_t rows : {0, 1, 5, 50}) check(act, values({rows, act.gated() ? 2 * width : width}, dtype));
        check(act, values({2, 3, act.gated() ? 2 * width : width}, dtype, /*gaps=*/true));
      }
}

TEST(KernelsActivation, SupportsAnyInterleaveSize) {
  for (auto act : every_act()) {
    if (!act.gated()) continue;
    for (const int64_t size : {1, 3, 8, 16, 24}) {
      act.interleave = size;
      for (const auto dtype : kVectorDtypes) check(act, values({3, 4 * size}, dtype));
    }
  }
}

TEST(KernelsActivation, ScaledRowsMatchFloat64) {
  for (auto act : every_act())
    for (const auto dtype : kVectorDtypes)
      for (const int64_t interleave : {0, 7}) {
        if (interleave && !act.gated()) continue;
        act.interleave = interleave;
        SCOPED_TRACE(testing::Message() << static_cast<int>(act.kind) << " " << dtype);
        const auto x = values({2, 3, 42}, dtype), s = at::randn({2, 3});
        const auto y = scaled_activation_forward(act, x, s);
        expect_near(y, scaled_activation_forward(act, exact(x), exact(s)), 5);
        const auto dy = values(y.sizes(), dtype);
        const auto [dx, ds] = scaled_activation_backward(act, dy, x, s, true, true);
        const auto [true_dx, true_ds] = scaled_activation_backward(act, exact(dy), exact(x), exact(s), true, true);
        expect_near(dx, true_dx, 10);
        expect_near(ds, true_ds, 100);
        const auto alone = scaled_activation_backward(act, dy, x, s, false, true);
        EXPECT_FALSE(alone.first.defined());
        EXPECT_TRUE(at::equal(alone.second, ds));
      }
}

/// Infinities, NaN, the largest and smallest values of a dtype, both zeros, and points where exp and tanh saturate.
at::Tensor edge_values(at::ScalarType dtype) {
  const double most = dtype == at::kHalf ? 65504 : dtype == at::kFloat ? 0x1.fffffep127 : 0x1.fep127;
  const double normal = dtype == at::kHalf ? 0x1p-14 : 0x1p-126;
  const double least = dtype == at::kHalf ? 0x1p-24 : dtype == at::kFloat ? 0x1p-149 : 0x1p-133;
  std::vector<double> values{kNan};
  for (const double v : {double{kInf}, most, most / 2, 1e4, 100., 89., 87., 20., 10., 1., 0.25, normal, least, 0.})
    values.insert(values.end(), {v, -v});
  return at::tensor(values, at::kDouble).to(dtype);
}

/// The expected values are the formula in float64: limits for finite arguments, which do not overflow there, and NaN
/// for inf·0.
void check_edges(const Act& act, const at::Tensor& x) {
  const auto y = activation_forward(act, x);
  const auto dy = at::ones(y.sizes(), x.scalar_type());
  expect_near(y, exact(formula(act, exact(x)).to(x.scalar_type())));
  expect_near(activation_backward(act, dy, x), exact(by_autograd(act, dy, x).to(x.scalar_type())));
}

TEST(KernelsActivation, EdgeValuesMatchFormula) {
  for (const auto& act : every_act())
    for (const auto dtype : kVectorDtypes) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(act.kind) << " " << dtype);
      const auto edges = edge_values(dtype);
      if (!act.gated()) {
        check_edges(act, edges);
        continue;
      }
      const auto ones = at::ones_like(edges);
      check_edges(act, at::cat({edges, ones}));
      check_edges(act, at::cat({ones, edges}));
      check_edges(act, at::cat({edges, ones * -2}));
    }
}

TEST(KernelsActivation, KeepsSignOfZero) {
  for (const auto kind : {ActKind::gelu, ActKind::gelu_erf, ActKind::qgelu, ActKind::silu})
    for (const auto dtype : kVectorDtypes) {
      const auto y = activation_forward({.kind = kind}, at::tensor({0.F, -0.F}).to(dtype)).to(at::kFloat);
      EXPECT_FALSE(std::signbit(y[0].item<float>()));
      EXPECT_TRUE(std::signbit(y[1].item<float>()));
    }
}

TEST(KernelsActivation, GradientOfLargeFloat64IsItsLimit) {
  const auto x = at::tensor({-1e308, 1e308, -double{kInf}, double{kInf}}, at::kDouble);
  for (const auto kind : {ActKind::gelu, ActKind::gelu_erf, ActKind::qgelu, ActKind::silu}) {
    const auto dx = activation_backward({.kind = kind}, at::ones_like(x), x);
    EXPECT_EQ(dx[0].item<double>(), 0);
    EXPECT_EQ(dx[1].item<double>(), 1);
    EXPECT_TRUE(dx.slice(0, 2).isnan().all().item<bool>()) << dx;
  }
}

TEST(KernelsActivation, Float16OverflowsToInfinity) {
  const auto x = at::tensor({300.F, -300.F, 100.F, 65504.F}).to(at::kHalf);
  const auto y = activation_forward({.kind = ActKind::srelu}, x).to(at::kFloat);
  EXPECT_TRUE(at::equal(y, at::tensor({kInf, 0.F, 10000.F, kInf}))) << y;
}

/// x·Φ(x) and its derivative to a few float32 ulp of the larger term, also where 1 + erf(x/√2) cancels (not in ATen).
TEST(KernelsActivation, GeluErfIsAccurateInTails) {
  const double absolute = vector_tier(c10::DeviceType::CPU, at::kFloat) == Tier::ref ? 1e-6 : 0;
  const auto x = at::linspace(-12.5, 12.5, 100001), z = exact(x);
  const auto density = at::exp(z * z / -2) * 0.3989422804014327, cdf = at::special_erfc(z * -std::sqrt(0.5)) / 2;
  const Act act{.kind = ActKind::gelu_erf};
  const auto expect_error_below = [&](const at::Tensor& got, const at::Tensor& truth, const at::Tensor& size) {
    EXPECT_LE(((exact(got) - truth).abs() - size * 5e-7).max().item<double>(), absolute);
  };
  expect_error_below(activation_forward(act, x), z * cdf, (z * cdf).abs());
  expect_error_below(activation_backward(act, at::ones_like(x), x), cdf + z * density, cdf + z.abs() * density);
}

TEST(KernelsActivation, ColumnSumsDoNotDependOnThreads) {
  if (vector_tier(c10::DeviceType::CPU, at::kFloat) == Tier::ref)
    GTEST_SKIP() << "ATen's column sums depend on the number of threads";
  const auto x = values({700, 1000}, at::kBFloat16), dy = values({700, 1000}, at::kBFloat16);
  const auto threads = at::get_num_threads();
  const auto several = activation_backward_column_sums({}, dy, x).column_sums;
  at::set_num_threads(1);
  const auto one = activation_backward_column_sums({}, dy, x).column_sums;
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(one, several));
}

}  // namespace
}  // namespace weft::kernels
