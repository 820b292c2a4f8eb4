// Every epilogue of the GEMM, on the active tier, against float64.
#include "weft/kernels/gemm.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "weft/kernels/pieces.h"

namespace weft::kernels {
namespace {

using at::Tensor;

struct Shape {
  int64_t m, n, k;
};

std::vector<Shape> shapes() {
  return {{1, 1, 1},    {0, 8, 8},    {8, 0, 8},      {8, 8, 0},      {1, 64, 32},   {7, 33, 65},   {31, 62, 31},
          {32, 32, 32}, {33, 34, 33}, {100, 130, 70}, {64, 48, 1200}, {300, 96, 40}, {40, 520, 96}, {5, 1030, 17}};
}

double error(const Tensor& got, const Tensor& want) {
  if (want.numel() == 0) return got.sizes() == want.sizes() ? 0 : 1e9;
  const auto scale = std::max(1e-30, want.norm().item<double>());
  return (got.to(at::kDouble) - want).norm().item<double>() / scale;
}

double tolerance(at::ScalarType dtype) { return dtype == at::kBFloat16 ? 6e-3 : dtype == at::kHalf ? 1e-3 : 2e-6; }

Tensor random(at::IntArrayRef sizes, at::ScalarType dtype) { return at::randn(sizes).to(dtype); }

/// What gemm() promises, in float64.
GemmResult plain(const Tensor& a, const Tensor& b, const Epilogue& e) {
  GemmResult r;
  auto v = at::mm(a.to(at::kDouble), b.to(at::kDouble)) * e.scale;
  if (e.bias.defined()) v = v + e.bias.to(at::kDouble);
  if (e.keep_pre) r.pre = v;
  if (e.act) v = activation_forward(*e.act, v);
  if (e.slope) {
    const auto at = e.at.to(at::kDouble);
    if (e.keep_again) r.again = activation_forward(*e.slope, at);
    v = activation_backward(*e.slope, v, at);
  }
  if (e.keep_sums) r.sums = v.sum(0);
  if (e.add.defined()) v = v + e.add.to(at::kDouble);
  r.out = v;
  return r;
}

void check(const Tensor& a, const Tensor& b, const Epilogue& e, const std::string& what) {
  const auto want = plain(a, b, e);
  const auto got = gemm(a, b, e);
  const int roundings = machine_tier() == Tier::ref ? 3 : 1;  // one for each ATen call
  const double bound = roundings * std::max(tolerance(a.scalar_type()), tolerance(got.out.scalar_type()));
  EXPECT_LE(error(got.out, want.out), bound) << what;
  ASSERT_EQ(got.pre.defined(), want.pre.defined()) << what;
  ASSERT_EQ(got.again.defined(), want.again.defined()) << what;
  ASSERT_EQ(got.sums.defined(), want.sums.defined()) << what;
  if (want.pre.defined()) {
    EXPECT_LE(error(got.pre, want.pre), bound) << what;
  }
  if (want.again.defined()) {
    EXPECT_LE(error(got.again, want.again), bound) << what;
  }
  if (want.sums.defined()) {
    EXPECT_LE(error(got.sums, want.sums), 2 * bound) << what;
  }
  if (e.out.defined()) {
    EXPECT_EQ(got.out.data_ptr(), e.out.data_ptr()) << what;
  }
}

class KernelsProduct : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { at::manual_seed(7); }
};

TEST_P(KernelsProduct, AnyShapeAndStride) {
  for (const auto& [m, n, k] : shapes()) {
    const auto what = std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
    const auto a = random({m, k}, GetParam()), b = random({k, n}, GetParam());
    check(a, b, {}, what);
    check(a.t().contiguous().t(), b, {}, what + " A transposed");
    check(a, b.t().contiguous().t(), {}, what + " B transposed");
    check(random({m, 2 * k + 1}, GetParam()).narrow(1, 1, k), random({k, 2 * n}, GetParam()).narrow(1, n, n), {},
          what + " slices");
    check(random({2 * m, 2 * k}, GetParam()).slice(0, 0, 2 * m, 2).slice(1, 0, 2 * k, 2), b, {}, what + " steps");
  }
}

TEST_P(KernelsProduct, BiasScaleAddAndDestination) {
  for (const auto& [m, n, k] : shapes()) {
    const auto what = std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
    const auto a = random({m, k}, GetParam()), b = random({k, n}, GetParam());
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      check(a, b, {.scale = 0.5, .bias = random({n}, dtype), .add = random({m, n}, dtype)}, what + " bias, add");
      check(a, b, {.out = random({m, n}, dtype)}, what + " out");
      check(a, b, {.out = random({n, m}, dtype).t()}, what + " out transposed");
      check(a, b, {.scale = -2, .keep_sums = true, .dtype = at::kFloat}, what + " sums");
    }
    const auto out = random({m, n}, at::kFloat), before = out.to(at::kDouble);
    gemm(a, b, {.add = out, .out = out});
    EXPECT_LE(error(out, before + at::mm(a.to(at::kDouble), b.to(at::kDouble))), tolerance(GetParam())) << what;
  }
}

TEST_P(KernelsProduct, EveryActivation) {
  for (int kind = 0; kind <= static_cast<int>(ActKind::clamped_swiglu); ++kind) {
    const Act act{.kind = static_cast<ActKind>(kind)};
    for (const auto& [m, n, k] : shapes()) {
      const auto what =
          "kind " + std::to_string(kind) + ": " + std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
      const auto a = random({m, k}, GetParam()), b = (random({k, n}, at::kFloat) / (1.0 + k)).to(GetParam());
      const auto columns = act.gated() ? n / 2 : n;
      if (!act.gated() || n % 2 == 0)
        check(a, b,
              {.bias = random({n}, GetParam()), .act = act, .keep_pre = true, .add = random({m, columns}, GetParam())},
              what + " value");
      const auto at = random({m, act.gated() ? 2 * n : n}, GetParam());
      check(a, b, {.slope = act, .at = at, .keep_again = true, .keep_sums = true}, what + " slope");
    }
  }
}

TEST_P(KernelsProduct, ManyBlocks) {
  for (const auto& [m, n, k] : {Shape{700, 600, 520}, Shape{600, 300, 2500}, Shape{1100, 70, 64}}) {
    const auto what = std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
    const auto a = random({m, k}, GetParam()), b = random({k, n}, GetParam());
    const auto bt = b.t().contiguous().t(), at = a.t().contiguous().t();
    check(a, bt, {.bias = random({n}, GetParam()), .act = Act{}, .keep_pre = true, .weight = true}, what + " forward");
    check(a, b, {.weight = true}, what + " input gradient");
    check(at, b, {.out = at::empty({m, n})}, what + " weight gradient");
  }
}

/// Large results leave in whole lines; the second half of these begins in the middle of one.
TEST_P(KernelsProduct, GatedHalvesThatBeginWithinALine) {
  const int64_t m = 544, n = 1008, k = 64;
  for (const auto kind : {ActKind::swiglu, ActKind::reglu}) {
    const Act act{.kind = kind};
    const auto a = random({m, k}, GetParam()), b = random({k, 2 * n}, GetParam());
    check(a, b, {.bias = random({2 * n}, GetParam()), .act = act, .keep_pre = true}, "value");
    check(a.t().contiguous().t(), b, {.act = act, .keep_pre = true}, "value, A transposed");
    const Epilogue slope{.slope = act, .at = random({m, 2 * n}, GetParam()), .keep_again = true, .keep_sums = true};
    check(a, b.narrow(1, 0, n), slope, "slope");
  }
}

/// All 65,536 values of bfloat16.
Tensor every_bfloat16() { return at::arange(-32768, 32768, at::kShort).view(at::kBFloat16); }

/// Within a unit of bfloat16, or of the largest slope's where two terms cancel, and mostly the same; NaN and ±inf
/// alike.
void expect_a_unit_apart(const Tensor& got, const Tensor& want) {
  EXPECT_TRUE(at::allclose(got.to(at::kDouble), want.to(at::kDouble), 0x1p-7, 0x1p-12, /*equal_nan=*/true));
  const auto differs = at::ne(got, want) & at::gt(want.abs(), 1e-30);  // what is smaller stands for the limit 0
  EXPECT_LE(differs.to(at::kDouble).mean().item<double>(), 0.01);
}

/// What an epilogue makes of any argument is what the activation makes of it alone, though it is computed in less
/// digits.
TEST(KernelsProductOfZero, GivesTheActivationOfEveryValue) {
  if (machine_tier() == Tier::ref) GTEST_SKIP() << "ATen gives NaN for large values";
  const auto x = every_bfloat16(), one = at::ones_like(x);
  const auto n = x.numel();
  const auto zeros = at::zeros({32, 32}, at::kBFloat16);
  for (const auto kind :
       {ActKind::gelu, ActKind::silu, ActKind::relu, ActKind::srelu, ActKind::swiglu, ActKind::geglu}) {
    SCOPED_TRACE(static_cast<int>(kind));
    const Act act{.kind = kind};
    const auto bias = act.gated() ? at::cat({x, one}) : x;
    const auto got = gemm(zeros, at::zeros({32, bias.numel()}, at::kBFloat16), {.bias = bias, .act = act});
    expect_a_unit_apart(got.out[31], activation_forward(act, bias.view({1, -1})).view(-1));

    const auto dy = at::ones({32, 1}, at::kBFloat16), w = at::ones({1, n}, at::kBFloat16);
    const auto slope = gemm(dy, w, {.slope = act, .at = bias.expand({32, -1}).contiguous(), .keep_again = true});
    expect_a_unit_apart(slope.out[31], activation_backward(act, one.view({1, -1}), bias.view({1, -1})).view(-1));
    expect_a_unit_apart(slope.again[31], got.out[31]);
  }
}

/// A gradient made in tiles, too: they are those of its transpose, and a product that takes them is the same to the
/// bit.
TEST(KernelsTiles, AreThoseOfTheTransposeAndGiveTheSameProduct) {
  for (const auto kind : {ActKind::gelu, ActKind::silu, ActKind::relu, ActKind::srelu, ActKind::swiglu, ActKind::geglu})
    for (const auto& [m, n, k] : {Shape{32, 32, 64}, Shape{96, 64, 1500}, Shape{544, 320, 96}}) {
      const Act act{.kind = kind};
      const auto columns = act.gated() ? 2 * n : n;
      const auto dy = random({m, k}, at::kBFloat16), w = random({k, n}, at::kBFloat16);
      Epilogue e{.slope = act, .at = random({m, columns}, at::kBFloat16), .keep_again = true, .keep_sums = true};
      const auto want = gemm(dy, w, e);
      e.keep_tiles = true;
      const auto got = gemm(dy, w, e);
      ASSERT_EQ(got.tiles.defined(), machine_tier() == Tier::amx);
      for (const auto part : {&GemmResult::out, &GemmResult::again, &GemmResult::sums})
        EXPECT_TRUE(at::equal(got.*part, want.*part));
      if (!got.tiles.defined()) return;
      const auto tiles = at::empty_like(got.tiles);
      pack_rows(want.out.t().contiguous(), tiles);
      EXPECT_TRUE(at::equal(got.tiles, tiles));

      const auto x = random({m, 70}, at::kBFloat16);
      const auto before = random({columns, 70}, at::kFloat), sum = before.clone(), with_tiles = before.clone();
      gemm(transposed(got.out), x, {.add = sum, .out = sum});
      gemm(transposed(got.out, got.tiles), x, {.add = with_tiles, .out = with_tiles});
      EXPECT_TRUE(at::equal(sum, with_tiles));
    }
}

TEST(KernelsTiles, AreLeftOutWhereTheResultIsNotMadeInWholeOnes) {
  for (const auto& [m, n, k] : {Shape{33, 32, 64}, Shape{64, 40, 64}}) {
    const auto e = Epilogue{.slope = Act{}, .at = random({m, n}, at::kBFloat16), .keep_tiles = true};
    EXPECT_FALSE(gemm(random({m, k}, at::kBFloat16), random({k, n}, at::kBFloat16), e).tiles.defined());
  }
  const auto a = random({64, 64}, at::kBFloat16), b = random({64, 64}, at::kBFloat16);
  const auto rare = Epilogue{.slope = Act{.kind = ActKind::qgelu}, .at = a, .keep_tiles = true};
  EXPECT_FALSE(gemm(a, b, rare).tiles.defined());
  EXPECT_FALSE(gemm(a, b, {.keep_tiles = true}).tiles.defined());
  if (machine_tier() == Tier::amx) {
    EXPECT_THROW(gemm(transposed(a, b), b), c10::ValueError);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, KernelsProduct, testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

}  // namespace
}  // namespace weft::kernels
