// Every GEMM epilogue in the active tier against float64, element by element.
#include "weft/kernels/gemm.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/cpp/kernels/gemm_bound.h"
#include "weft/kernels/grouped.h"
#include "weft/kernels/row_chunks.h"

namespace weft::kernels {
namespace {

using at::Tensor;

struct Shape {
  int64_t m, n, k;
};
std::string text(const Shape& s) { return std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k); }

/// Empty matrices, partial tiles and panels in each dimension, several panels, one K-block and several.
std::vector<Shape> shapes() {
  return {{1, 1, 1},     {0, 8, 8},     {8, 0, 8},     {8, 8, 0},      {1, 64, 32},    {7, 33, 65},    {16, 16, 16},
          {31, 62, 31},  {32, 32, 32},  {33, 34, 33},  {17, 64, 63},   {64, 66, 64},   {65, 128, 96},  {100, 130, 70},
          {300, 96, 40}, {40, 520, 96}, {5, 1030, 17}, {33, 66, 1152}, {65, 34, 1153}, {64, 48, 1200}, {31, 64, 2305}};
}

/// Every combination of sizes around the tile (16), the k-step and panel (32) and two panels (64).
std::vector<Shape> boundary_shapes() {
  const std::vector<int64_t> sizes{1, 15, 16, 17, 31, 32, 33, 63, 64, 65};
  std::vector<Shape> all;
  for (const auto m : sizes)
    for (const auto n : sizes)
      for (const auto k : sizes) all.push_back({m, n, k});
  return all;
}

/// Sizes around the limits of AMX's resident block and of its K-block: 448 rows with K = 1152 fill the resident block,
/// 224 rows with a larger K; results of more than 1 MB use non-temporal stores. Other tiers split at 1024 rows only.
std::vector<Shape> block_shapes(at::ScalarType dtype) {
  if (choose_gemm_tier(at::kCPU, dtype, 64, 1152).tier != Tier::amx)
    return {{225, 31, 2304}, {1100, 70, 64}, {520, 1056, 96}};
  return {{447, 64, 1152},  {449, 65, 1152}, {224, 96, 1153}, {225, 31, 2304}, {700, 600, 520},
          {600, 300, 2500}, {1100, 70, 64},  {520, 1056, 96}, {34, 2080, 1160}};
}

void check(const Matrix& a, const Matrix& b, const Epilogue& e, const std::string& what) {
  const BoundedGemm want(gemm_tier(a, b, e), a, b, e);
  const auto got = gemm(a, b, e);
  expect_within(got, want, what);
  if (e.out.defined()) {
    EXPECT_EQ(got.out.data_ptr(), e.out.data_ptr()) << what;
  }
}

/// A matrix inside a larger one, at an odd offset and with an odd row stride. The elements around it must not change.
class PaddedMatrix {
 public:
  PaddedMatrix(int64_t rows, int64_t columns, at::ScalarType dtype)
      : storage_(random({rows + 2, columns + 3 + columns % 2}, dtype)),
        matrix_(storage_.narrow(0, 1, rows).narrow(1, 1, columns)),
        before_(storage_.clone()) {}
  const Tensor& matrix() const { return matrix_; }
  void expect_padding_untouched() const {
    before_.narrow(0, 1, matrix_.size(0)).narrow(1, 1, matrix_.size(1)).copy_(matrix_);
    EXPECT_TRUE(at::equal(storage_, before_));
  }

 private:
  Tensor storage_, matrix_, before_;
};

class KernelsGemm : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { at::manual_seed(7); }
};

TEST_P(KernelsGemm, MatchesFloat64AroundTileAndPanelSizes) {
  for (const auto& shape : boundary_shapes()) {
    const auto& [m, n, k] = shape;
    check(random({m, k}, GetParam()), random({k, n}, GetParam()), {.bias = random({n}, GetParam())}, text(shape));
    const auto dy = random({k, m}, GetParam()), x = random({k, n}, GetParam());
    const auto main_grad = random({m, n}, at::kFloat);
    check(transposed(dy), x, {.addend = main_grad, .out = main_grad}, text(shape) + " weight gradient");
    check(transposed(dy), transposed(random({n, k}, GetParam())), {}, text(shape) + " both transposed");
  }
}

TEST_P(KernelsGemm, SupportsAnyShapeAndStride) {
  for (const auto& shape : shapes()) {
    const auto& [m, n, k] = shape;
    const auto what = text(shape);
    const auto a = random({m, k}, GetParam()), b = random({k, n}, GetParam());
    check(a, b, {}, what);
    check(a.t().contiguous().t(), b, {}, what + " A transposed");
    check(a, b.t().contiguous().t(), {}, what + " B transposed");
    check(random({m, 2 * k + 1}, GetParam()).narrow(1, 1, k), random({k, 2 * n}, GetParam()).narrow(1, n, n), {},
          what + " slices");
    check(random({2 * m, 2 * k}, GetParam()).slice(0, 0, 2 * m, 2).slice(1, 0, 2 * k, 2), b, {}, what + " strided");
  }
}

TEST_P(KernelsGemm, SupportsBiasScaleAddendAndOut) {
  for (const auto& shape : shapes()) {
    const auto& [m, n, k] = shape;
    const auto what = text(shape);
    const auto a = random({m, k}, GetParam()), b = random({k, n}, GetParam());
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      check(a, b, {.scale = 0.5, .bias = random({n}, dtype), .addend = random({m, n}, dtype)}, what + " bias, addend");
      check(a, b, {.out = random({m, n}, dtype)}, what + " out");
      check(a, b, {.out = random({n, m}, dtype).t()}, what + " out transposed");
      check(a, b, {.scale = -2, .keep_column_sums = true, .dtype = at::kFloat}, what + " column sums");
    }
  }
}

/// A weight gradient accumulates into or overwrites main_grad of any dtype. With a float32 main_grad nothing is rounded
/// to the dtype of the operands.
TEST_P(KernelsGemm, AccumulatesOrOverwritesMainGradOfAnyDtype) {
  auto all = shapes();
  for (const auto& shape : block_shapes(GetParam())) all.push_back(shape);
  for (const auto& shape : all)
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const auto& [m, n, k] = shape;
      const auto dy = random({k, m}, GetParam()), x = random({k, n}, GetParam());
      for (const double scale : {1., 0.5}) {
        const auto what = text(shape) + " into " + c10::toString(dtype) + ", scale " + std::to_string(scale);
        const auto main_grad = random({m, n}, dtype);
        check(transposed(dy), x, {.scale = scale, .addend = main_grad, .out = main_grad}, what + ", accumulated");
        check(transposed(dy), x, {.scale = scale, .out = main_grad}, what + ", overwritten");
      }
      PaddedMatrix padded(m, n, dtype);
      check(transposed(dy), x, {.addend = padded.matrix(), .out = padded.matrix()}, text(shape) + ", padded");
      padded.expect_padding_untouched();
    }
}

TEST_P(KernelsGemm, SupportsUnalignedTensors) {
  auto all = shapes();
  all.push_back({520, 1056, 96});
  for (const auto& shape : all) {
    const auto& [m, n, k] = shape;
    if (n % 2 == 1) continue;
    for (const auto kind : {ActKind::gelu, ActKind::swiglu, ActKind::qgelu}) {
      const Act act{.kind = kind};
      const auto columns = act.gated() ? n / 2 : n, twice = act.gated() ? 2 * n : n;
      const PaddedMatrix a(m, k, GetParam()), b(k, n, GetParam()), bias(1, n, GetParam());
      const PaddedMatrix out(m, columns, GetParam()), addend(m, columns, GetParam());
      const auto what = text(shape) + " kind " + std::to_string(int(kind));
      check(
          a.matrix(), b.matrix(),
          {.bias = bias.matrix()[0], .act = act, .keep_pre_act = true, .addend = addend.matrix(), .out = out.matrix()},
          what);
      const PaddedMatrix grad(m, twice, GetParam()), act_input(m, twice, GetParam());
      const Epilogue e{.act_grad = act,
                       .act_input = act_input.matrix(),
                       .keep_act_output = true,
                       .keep_column_sums = true,
                       .out = grad.matrix()};
      check(a.matrix(), b.matrix(), e, what + " act_grad");
      for (const auto* padded : {&a, &b, &bias, &out, &addend, &grad, &act_input}) padded->expect_padding_untouched();
    }
  }
}

TEST_P(KernelsGemm, SupportsEveryActivation) {
  for (int kind = 0; kind <= static_cast<int>(ActKind::clamped_swiglu); ++kind) {
    const Act act{.kind = static_cast<ActKind>(kind)};
    for (const auto& shape : shapes()) {
      const auto& [m, n, k] = shape;
      const auto what = "kind " + std::to_string(kind) + ": " + text(shape);
      const auto a = random({m, k}, GetParam()), b = (random({k, n}, at::kFloat) / std::sqrt(1.0 + k)).to(GetParam());
      const auto columns = act.gated() ? n / 2 : n;
      if (!act.gated() || n % 2 == 0) {
        const auto bias = random({n}, GetParam());
        check(a, b, {.bias = bias, .act = act, .keep_pre_act = true}, what + " value");
        check(a, b, {.scale = 0.5, .bias = bias, .act = act, .addend = random({m, columns}, GetParam())},
              what + " addend");
      }
      const auto act_input = random({m, act.gated() ? 2 * n : n}, GetParam());
      check(a, b, {.act_grad = act, .act_input = act_input, .keep_act_output = true, .keep_column_sums = true},
            what + " act_grad");
      check(a, b, {.scale = -2, .act_grad = act, .act_input = act_input}, what + " scaled act_grad");
    }
  }
}

TEST_P(KernelsGemm, SpansManyBlocks) {
  for (const auto& shape : block_shapes(GetParam())) {
    const auto& [m, n, k] = shape;
    const auto what = text(shape);
    const auto a = random({m, k}, GetParam()), b = (random({k, n}, at::kFloat) / std::sqrt(double(k))).to(GetParam());
    const auto bt = b.t().contiguous().t();
    const auto bias = random({n}, GetParam());
    check(a, bt, {.bias = bias, .act = Act{}, .keep_pre_act = true, .b_is_weight = true}, what + " forward");
    if (n % 2 == 0)
      check(a, bt, {.bias = bias, .act = Act{.kind = ActKind::swiglu}, .keep_pre_act = true}, what + " gated");
    check(a, b, {.b_is_weight = true}, what + " input gradient");
    check(a, b, {.addend = random({m, n}, GetParam())}, what + " addend");
    const Epilogue grad{
        .act_grad = Act{}, .act_input = random({m, n}, GetParam()), .keep_act_output = true, .keep_column_sums = true};
    check(a, b, grad, what + " act_grad");
  }
}

/// Large results use non-temporal stores of full cache lines; the second half of these starts within a cache line.
TEST_P(KernelsGemm, GatedHalvesMayStartMidCacheLine) {
  const int64_t m = 544, n = 1008, k = 64;
  for (const auto kind : {ActKind::swiglu, ActKind::reglu}) {
    const Act act{.kind = kind};
    const auto a = random({m, k}, GetParam()), b = (random({k, 2 * n}, at::kFloat) / 8).to(GetParam());
    check(a, b, {.bias = random({2 * n}, GetParam()), .act = act, .keep_pre_act = true}, "value");
    check(a.t().contiguous().t(), b, {.act = act, .keep_pre_act = true}, "value, A transposed");
    const Epilogue grad{.act_grad = act,
                        .act_input = random({m, 2 * n}, GetParam()),
                        .keep_act_output = true,
                        .keep_column_sums = true};
    check(a, b.narrow(1, 0, n), grad, "act_grad");
  }
}

/// All 65,536 values of bfloat16.
Tensor every_bfloat16() { return at::arange(-32768, 32768, at::kShort).view(at::kBFloat16); }

/// Within one bfloat16 ulp (of the largest derivative where two terms cancel), at least 99 % of them equal, and NaN and
/// ±inf in the same places.
void expect_within_one_ulp(const Tensor& got, const Tensor& want) {
  EXPECT_TRUE(at::allclose(got.to(at::kDouble), want.to(at::kDouble), 0x1p-7, 0x1p-12, /*equal_nan=*/true));
  const auto differs = at::ne(got, want) & at::gt(want.abs(), 1e-30);  // smaller values stand for the limit 0
  EXPECT_LE(differs.to(at::kDouble).mean().item<double>(), 0.01);
}

/// The activation in an epilogue, computed with lower precision, matches the standalone activation for every argument.
TEST(KernelsGemmActivation, MatchesActivationForEveryBfloat16) {
  const auto x = every_bfloat16(), one = at::ones_like(x);
  const auto n = x.numel();
  const auto zeros = at::zeros({32, 32}, at::kBFloat16);
  for (int kind = 0; kind <= static_cast<int>(ActKind::clamped_swiglu); ++kind) {
    SCOPED_TRACE(kind);
    const Act act{.kind = static_cast<ActKind>(kind)};
    const auto bias = act.gated() ? at::cat({x, one}) : x;
    const auto got = gemm(zeros, at::zeros({32, bias.numel()}, at::kBFloat16), {.bias = bias, .act = act});
    expect_within_one_ulp(got.out[31], activation_forward(act, bias.view({1, -1})).view(-1));

    const auto dy = at::ones({32, 1}, at::kBFloat16), w = at::ones({1, n}, at::kBFloat16);
    const auto grad =
        gemm(dy, w, {.act_grad = act, .act_input = bias.expand({32, -1}).contiguous(), .keep_act_output = true});
    expect_within_one_ulp(grad.out[31], activation_backward(act, one.view({1, -1}), bias.view({1, -1})).view(-1));
    expect_within_one_ulp(grad.act_output[31], got.out[31]);
  }
}

/// Allocates memory that starts in the middle of a cache line.
class OffsetAllocator final : public c10::Allocator {
 public:
  OffsetAllocator() : default_allocator_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this); }
  ~OffsetAllocator() override { c10::SetCPUAllocator(default_allocator_); }
  OffsetAllocator(const OffsetAllocator&) = delete;
  OffsetAllocator& operator=(const OffsetAllocator&) = delete;

  c10::DataPtr allocate(size_t bytes) override {
    auto* p = static_cast<char*>(std::aligned_alloc(64, (bytes + 191) / 64 * 64)) + kOffset;
    return {p, p, &free_offset, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_offset; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static constexpr int64_t kOffset = 32;
  static void free_offset(void* p) { std::free(static_cast<char*>(p) - kOffset); }
  c10::Allocator* default_allocator_;
};

/// Non-temporal stores need every output to be aligned, not only the first.
TEST(KernelsNonTemporalStores, AllowUnalignedNeighborOutputs) {
  const int64_t m = 544, n = 1024, k = 64;
  const auto a = random({m, k}, at::kBFloat16), b = random({k, n}, at::kBFloat16);
  for (const auto kind : {ActKind::gelu, ActKind::swiglu}) {
    const Act act{.kind = kind};
    const auto columns = act.gated() ? n / 2 : n, twice = act.gated() ? 2 * n : n;
    const Epilogue value{
        .act = act, .keep_pre_act = true, .out = at::empty({2 * m, columns}, a.options()).narrow(0, 0, m)};
    const Epilogue grad{.act_grad = act,
                        .act_input = random({m, twice}, at::kBFloat16),
                        .keep_act_output = true,
                        .out = at::empty({m, twice}, a.options())};
    for (const auto& e : {value, grad}) {
      const auto want = gemm(a, b, e);
      const auto out = want.out.clone();
      const auto got = [&] {
        const OffsetAllocator offset;
        return gemm(a, b, e);
      }();
      EXPECT_TRUE(at::equal(got.out, out));
      for (const auto part : {&GemmResult::pre_act, &GemmResult::act_output}) {
        if (!(want.*part).defined()) continue;
        EXPECT_NE(reinterpret_cast<uintptr_t>((got.*part).data_ptr()) % 64, 0U);
        EXPECT_TRUE(at::equal(got.*part, want.*part));
      }
    }
  }
}

/// A progress callback runs with tiles released and with its own scratch, so it may call a GEMM of weft or of ATen.
TEST(KernelsProgressCallback, MayCallGemm) {
  at::manual_seed(7);
  const auto x = random({70, 1300}, at::kBFloat16), y = random({1300, 90}, at::kBFloat16);
  const auto w = random({3, 64, 96}, at::kBFloat16), rows = random({100, 96}, at::kBFloat16);
  const GroupIndex splits(at::tensor({30, 0, 70}, at::kLong));
  const auto inner = [&] {
    return std::vector{gemm(x, y).out, at::mm(x, y), gemm(x, y, {.act = Act{.kind = ActKind::swiglu}}).out,
                       grouped_gemm(splits, rows, GroupedMatrix(w), true)};
  };
  const auto want_inner = inner();
  const auto a = random({500, 1200}, at::kBFloat16), b = random({1200, 640}, at::kBFloat16);
  for (Epilogue e : {Epilogue{}, Epilogue{.act = Act{}, .keep_pre_act = true},
                     Epilogue{.act = Act{.kind = ActKind::swiglu}, .keep_pre_act = true}}) {
    const auto want = gemm(a, b, e);
    int calls = 0;
    const std::function<void()> progress = [&] {
      if (++calls % 16 != 1) return;
      const auto got = inner();
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], want_inner[i])) << i;
    };
    e.progress = &progress;
    const auto got = gemm(a, b, e);
    EXPECT_TRUE(at::equal(got.out, want.out));
    EXPECT_TRUE(!got.pre_act.defined() || at::equal(got.pre_act, want.pre_act));
    if (machine_tier() == Tier::amx) {
      EXPECT_GT(calls, 10);
    }
  }
}

/// The packed transpose equals the transpose packed separately, and a GEMM that reads it gives bitwise the same result.
TEST(KernelsOperandForwarding, PackedTransposeGivesSameGemm) {
  for (const auto kind : {ActKind::gelu, ActKind::silu, ActKind::relu, ActKind::srelu, ActKind::swiglu, ActKind::geglu})
    for (const auto& [m, n, k] : {Shape{32, 32, 64}, Shape{96, 64, 1500}, Shape{544, 320, 96}}) {
      const Act act{.kind = kind};
      const auto columns = act.gated() ? 2 * n : n;
      const auto dy = random({m, k}, at::kBFloat16), w = random({k, n}, at::kBFloat16);
      Epilogue e{.act_grad = act,
                 .act_input = random({m, columns}, at::kBFloat16),
                 .keep_act_output = true,
                 .keep_column_sums = true};
      const auto want = gemm(dy, w, e);
      e.keep_packed_transpose = true;
      const auto got = gemm(dy, w, e);
      ASSERT_EQ(got.packed_transpose.defined(), machine_tier() == Tier::amx);
      for (const auto part : {&GemmResult::out, &GemmResult::act_output, &GemmResult::column_sums})
        EXPECT_TRUE(at::equal(got.*part, want.*part));
      if (!got.packed_transpose.defined()) return;
      const auto want_packed = at::empty_like(got.packed_transpose);
      pack_rows(want.out.t().contiguous(), want_packed);
      EXPECT_TRUE(at::equal(got.packed_transpose, want_packed));

      const auto x = random({m, 70}, at::kBFloat16);
      const auto before = random({columns, 70}, at::kFloat), sum = before.clone(), with_packed = before.clone();
      gemm(transposed(got.out), x, {.addend = sum, .out = sum});
      gemm(transposed(got.out, got.packed_transpose), x, {.addend = with_packed, .out = with_packed});
      EXPECT_TRUE(at::equal(sum, with_packed));
    }
}

TEST(KernelsOperandForwarding, SkippedForPartialBlocks) {
  for (const auto& [m, n, k] : {Shape{33, 32, 64}, Shape{64, 40, 64}}) {
    const auto e =
        Epilogue{.act_grad = Act{}, .act_input = random({m, n}, at::kBFloat16), .keep_packed_transpose = true};
    EXPECT_FALSE(gemm(random({m, k}, at::kBFloat16), random({k, n}, at::kBFloat16), e).packed_transpose.defined());
  }
  const auto a = random({64, 64}, at::kBFloat16), b = random({64, 64}, at::kBFloat16);
  const auto rare = Epilogue{.act_grad = Act{.kind = ActKind::qgelu}, .act_input = a, .keep_packed_transpose = true};
  EXPECT_FALSE(gemm(a, b, rare).packed_transpose.defined());
  EXPECT_FALSE(gemm(a, b, {.keep_packed_transpose = true}).packed_transpose.defined());
  if (machine_tier() == Tier::amx) {
    EXPECT_THROW(gemm(transposed(a, b), b), c10::ValueError);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, KernelsGemm, testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

}  // namespace
}  // namespace weft::kernels
