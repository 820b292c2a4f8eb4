// Conversions and scales of quantization, value by value; and the matrices in the vector tiers against `ref`.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include <cmath>
#include <limits>

#include "tests/cpp/kernels/compare.h"
#include "weft/kernels/quantize.h"
#include "weft/kernels/quantize_math.h"
#include "weft/kernels/quantize_tiers.h"
#include "weft/kernels/quantized_gemm.h"

namespace weft::kernels {
namespace {

/// All values of a 16-bit dtype, as float32.
at::Tensor all_values(at::ScalarType dtype) {
  return at::arange(65536, at::kInt).to(at::kShort).view(dtype).to(at::kFloat);
}

template <Format kCodes>
void check_against_torch(at::ScalarType dtype) {
  constexpr float max = traits_of(kCodes).max;
  for (const auto source : {at::kBFloat16, at::kHalf}) {
    const at::Tensor values = all_values(source);
    const at::Tensor codes = values.clamp(-max, max).to(dtype).view(at::kByte);
    for (int64_t i = 0; i < values.numel(); ++i) {
      const float x = values.const_data_ptr<float>()[i];
      const auto expected = std::isnan(x) ? 0x7f : int{codes.const_data_ptr<uint8_t>()[i]};
      ASSERT_EQ(encode<kCodes>(x), expected) << x;
    }
  }
  for (int code = 0; code < 256; ++code) {
    const float value = at::full({1}, code, at::kByte).view(dtype).to(at::kFloat).item<float>();
    const float decoded = decode<kCodes, float>(code);
    ASSERT_TRUE(decoded == value || (std::isnan(decoded) && std::isnan(value))) << code;
    ASSERT_EQ(std::signbit(decoded), code >= 128);
  }
}

TEST(Quantize, Fp8CodesAreTorchs) {
  check_against_torch<Format::e4m3>(at::kFloat8_e4m3fn);
  check_against_torch<Format::e5m2>(at::kFloat8_e5m2);
}

TEST(Quantize, E2M1RoundsToEven) {
  constexpr std::array values{0.F, .5F, 1.F, 1.5F, 2.F, 3.F, 4.F, 6.F};
  for (int code = 0; code < 8; ++code) {
    EXPECT_EQ((decode<Format::e2m1, float>(code)), values[code]);
    EXPECT_EQ((decode<Format::e2m1, float>(code + 8)), -values[code]);
    EXPECT_EQ(encode<Format::e2m1>(-values[code]), code + 8);
    if (code == 7) continue;
    const float middle = (values[code] + values[code + 1]) / 2;
    EXPECT_EQ(encode<Format::e2m1>(middle), code + code % 2);
    EXPECT_EQ(encode<Format::e2m1>(std::nextafter(middle, 10.F)), code + 1);
    EXPECT_EQ(encode<Format::e2m1>(std::nextafter(middle, -10.F)), code);
  }
  EXPECT_EQ(encode<Format::e2m1>(std::numeric_limits<float>::quiet_NaN()), 7);
  EXPECT_EQ(encode<Format::e2m1>(-std::numeric_limits<float>::infinity()), 15);
}

TEST(Quantize, StochasticRoundingByRandomNumber) {
  struct Case {
    float x;
    int bits;  // of 8
    float rounded;
  };
  for (const auto& c : std::array<Case, 11>{{{.3F, 102, 0},
                                             {.3F, 103, .5F},
                                             {-1.9F, 51, -1.5F},
                                             {-1.9F, 52, -2},
                                             {3.7F, 76, 3},
                                             {3.7F, 77, 4},
                                             {5, 127, 4},
                                             {5, 128, 6},
                                             {6.5F, 0, 6},
                                             {6.5F, 255, 6},
                                             {.001F, 255, 0}}})
    EXPECT_EQ((decode<Format::e2m1, float>(encode_stochastic(c.x, static_cast<float>(c.bits) / 256))), c.rounded)
        << c.x << " with " << c.bits;
  EXPECT_EQ(encode_stochastic(std::numeric_limits<float>::quiet_NaN(), .5F), 7);
}

TEST(Quantize, ScalesOfTinyBlocksAreLimitedByTheDtype) {
  constexpr float kTiny = 1e-40F;
  EXPECT_EQ(float32_scale(kTiny, 448.F, 0, FLT_MAX, false), FLT_MAX);
  EXPECT_EQ(float32_scale(kTiny, 448.F, 0, 65504.F, true), 32768.F);
  EXPECT_EQ(float32_scale(std::numeric_limits<float>::infinity(), 448.F, 0, FLT_MAX, false), 1.F);
}

TEST(Quantize, E8M0RoundsUp) {
  EXPECT_EQ(e8m0_scale(448.F, 1.F / 448), 127);
  EXPECT_EQ(e8m0_scale(std::nextafter(448.F, 500.F), 1.F / 448), 128);
  EXPECT_EQ(e8m0_scale(std::numeric_limits<float>::infinity(), 1.F / 448), 254);
  EXPECT_EQ(decode_e8m0<float>(0), std::ldexp(1.F, -127));
  EXPECT_TRUE(std::isnan(decode_e8m0<float>(255)));
  for (int code = 0; code <= 254; ++code) EXPECT_EQ(e8m0_factor<float>(code), std::ldexp(1.F, 127 - code));
}

// ---- Matrices -------------------------------------------------------------------------------------------------------

/// Every kind of scale, block and option.
std::vector<Quantization> all_quantizations() {
  std::vector<Quantization> all;
  for (const auto format : {Format::e4m3, Format::e5m2}) {
    all.push_back({.format = format});
    all.push_back({.format = format, .power_of_two = true, .epsilon = 1e-3F});
    for (const bool square : {false, true}) {
      all.push_back({.format = format, .block = 128, .two_dimensional = square});
      all.push_back({.format = format, .block = 128, .two_dimensional = square, .power_of_two = true});
      all.push_back({.format = format, .scale_format = ScaleFormat::e8m0, .block = 32, .two_dimensional = square});
    }
  }
  const Quantization nvfp4{.format = Format::e2m1, .scale_format = ScaleFormat::e4m3, .block = 16};
  const auto add = [&](auto change) { change(all.emplace_back(nvfp4)); };
  add([](Quantization&) {});
  add([](Quantization& q) { q.two_dimensional = true; });
  add([](Quantization& q) { q.row_scaled = true; });
  add([](Quantization& q) { q.hadamard = true; });
  add([](Quantization& q) { q.stochastic_rounding = true; });
  add([](Quantization& q) { q.hadamard = q.stochastic_rounding = true; });
  for (const auto error : {FourOverSix::absolute, FourOverSix::squared}) {
    add([&](Quantization& q) { q.four_over_six = error; });
    add([&](Quantization& q) { q.four_over_six = error, q.two_dimensional = true, q.scale_bound = 256; });
  }
  return all;
}

/// Magnitudes from 2^-40 to 2^40, and zeros; infinities and NaN if `special`.
at::Tensor some_matrix(int64_t rows, int64_t columns, at::ScalarType dtype, bool special) {
  auto x = at::randn({rows, columns}) * at::randint(-40, 40, {rows, columns}).exp2();
  if (dtype == at::kHalf) x = x.clamp(-60000, 60000);
  x.masked_fill_(at::rand({rows, columns}) < 0.1, 0);
  if (special) x.masked_fill_(at::rand({rows, columns}) < 0.01, std::numeric_limits<float>::quiet_NaN());
  if (special) x.masked_fill_(at::rand({rows, columns}) < 0.002, -std::numeric_limits<float>::infinity());
  return x.to(dtype);
}

bool equal_with_nan(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.isnan(), b.isnan()) && at::equal(a.nan_to_num(0, 1, -1), b.nan_to_num(0, 1, -1));
}

void expect_equal(const QuantizedCopy& a, const QuantizedCopy& b) {
  ASSERT_EQ(a.defined(), b.defined());
  if (!a.defined()) return;
  EXPECT_TRUE(at::equal(a.data, b.data));
  EXPECT_TRUE(at::equal(a.scales, b.scales));
}

/// The copies that `ref` writes, and their decoded values, equal those of the machine's tier.
void check_against_ref(const at::Tensor& x, const Quantization& how) {
  const QuantizeArgs args{.columnwise = !how.row_scaled, .random = {.seed = 1234567890123, .offset = 1ULL << 40}};
  const auto q = quantize(x, how, args);
  auto expected = q;
  for (auto* copy : {&expected.rowwise, &expected.columnwise})
    if (copy->defined()) copy->data = at::empty_like(copy->data), copy->scales = at::empty_like(copy->scales);
  ref::quantize(x, args, expected);
  expect_equal(q.rowwise, expected.rowwise);
  expect_equal(q.columnwise, expected.columnwise);
  for (const bool columnwise : {false, true}) {
    const auto& copy = columnwise ? q.columnwise : q.rowwise;
    if (!copy.defined()) continue;
    for (const auto decoding : {Decoding::codes, Decoding::block_scaled, Decoding::values})
      EXPECT_TRUE(
          equal_with_nan(decode_copy(q, columnwise, decoding, at::kFloat), ref::decode_copy(q, columnwise, decoding)));
  }
}

TEST(Quantize, VectorTiersWriteTheBytesOfRef) {
  at::manual_seed(0);
  for (const auto& how : all_quantizations())
    for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{{16, 1}, {48, 33}, {144, 263}})
      for (const auto dtype : kVectorDtypes)
        for (const bool special : {false, true}) {
          if (how.hadamard && dtype != at::kBFloat16) continue;
          const auto odd_rows = how.hadamard ? rows : rows - 1;
          check_against_ref(some_matrix(odd_rows, columns, dtype, special), how);
        }
}

TEST(Quantize, DequantizedCopiesAreCloseToTheMatrix) {
  const auto x = at::randn({70, 200}).to(at::kBFloat16);
  for (const auto& how :
       std::array<Quantization, 3>{{{}, {.block = 128}, {.scale_format = ScaleFormat::e8m0, .block = 32}}}) {
    const auto q = quantize(x, how, {.columnwise = true});
    for (const bool columnwise : {false, true}) {
      const auto error = (dequantize(q, columnwise, at::kFloat) - x.to(at::kFloat)).abs();
      EXPECT_TRUE(error.le(x.to(at::kFloat).abs().mul(1.F / 16).add(.02)).all().item<bool>());
    }
  }
}

/// Y = X Wᵀ with scales that are folded into bfloat16 values, applied by the epilogue, or applied block by block.
TEST(Quantize, GemmIsThatOfDequantizedMatrices) {
  at::manual_seed(1);
  const auto x = at::randn({48, 300}), w = at::randn({80, 300});
  for (const auto& how : all_quantizations()) {
    if (how.row_scaled || how.hadamard) continue;
    const auto a = quantize(x, how, {}), b = quantize(w, how, {});
    const auto left = dequantize(a, false, at::kFloat).to(at::kDouble),
               right = dequantize(b, false, at::kFloat).to(at::kDouble);
    const auto y = quantized_gemm({a}, {b}, {.dtype = at::kFloat}).out.to(at::kDouble);
    const auto bound = left.abs().matmul(right.abs().t()) * (310 * std::ldexp(1, -24));
    EXPECT_TRUE((y - left.matmul(right.t())).abs().le(bound).all().item<bool>());
  }
}

/// The rowwise copies of rows [0, 40) and [40, 90), with the scale of all rows.
std::vector<QuantizedRowChunks::Chunk> two_chunks(const at::Tensor& x, const Quantization& how,
                                                  const QuantizedMatrix& all) {
  QuantizeArgs args;
  if (how.has_amax()) args.amax = all.rowwise.amax;
  return {{quantize(x.narrow(0, 0, 40), how, args), 0}, {quantize(x.narrow(0, 40, 50), how, args), 40}};
}

/// An activation and its gradient in the epilogue, bit for bit the separate kernels; all rows at once and in two parts.
TEST(Quantize, GemmWithAnActivationHasTheBitsOfSeparateSteps) {
  at::manual_seed(4);
  for (const auto& how : all_quantizations()) {
    if (how.row_scaled || how.hadamard || how.stochastic_rounding) continue;
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      SCOPED_TRACE(c10::str("block ", how.block, ", ", how.two_dimensional ? "square, " : "", "scale format ",
                            static_cast<int>(how.scale_format), ", ", dtype));
      const auto x = at::randn({90, 64}).to(dtype), w = at::randn({48, 64}).to(dtype);
      const auto bias = at::randn({48}).to(dtype), addend = at::randn({90, 48}).to(dtype);
      const auto a = quantize(x, how, {}), b = quantize(w, how, {});
      const auto v = quantized_gemm({a}, {b}, {.scale = 0.5, .bias = bias}).out;
      for (const auto kind : {ActKind::gelu, ActKind::swiglu}) {
        const Act act{.kind = kind};
        const auto input = at::randn({90, act.gated() ? 96 : 48}).to(dtype);
        const Epilogue forward{.scale = 0.5, .bias = bias, .act = act, .keep_pre_act = true};
        const Epilogue backward{
            .scale = 0.5, .bias = bias, .act_grad = act, .act_input = input, .keep_column_sums = true};
        const auto check = [&](const GemmResult& y, const GemmResult& dx) {
          EXPECT_TRUE(at::equal(y.pre_act, v));
          EXPECT_TRUE(at::equal(y.out, activation_forward(act, v)));
          const auto expected = activation_backward(act, v, input);
          EXPECT_TRUE(at::equal(dx.out, expected));
          const auto terms = expected.to(at::kDouble);
          const auto bound = terms.abs().sum(0) * 0x1p-8;
          EXPECT_TRUE((dx.column_sums.to(at::kDouble) - terms.sum(0)).abs().le(bound).all().item<bool>());
        };
        check(quantized_gemm({a}, {b}, forward), quantized_gemm({a}, {b}, backward));
        if (!multiplies_in_chunks(how)) continue;
        const QuantizedRowChunks chunks{.list = two_chunks(x, how, a), .rows = 90};
        check(quantized_gemm(chunks, {b}, forward), quantized_gemm(chunks, {b}, backward));
      }
      const auto sum = quantized_gemm({a}, {b}, {.addend = addend, .out = addend.clone()});
      EXPECT_TRUE(at::allclose(sum.out, quantized_gemm({a}, {b}, {}).out + addend, 1e-2, 1e-2));
    }
  }
}

TEST(Quantize, GemmOfRowsThatArriveInPartsIsThatOfAllRows) {
  at::manual_seed(2);
  for (const auto& how : all_quantizations()) {
    if (!multiplies_in_chunks(how) || how.hadamard || how.stochastic_rounding) continue;
    for (const int64_t columns : {33, 300}) {
      for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
        const auto x = at::randn({90, columns}).to(dtype), w = at::randn({72, columns}).to(dtype);
        const auto bias = at::randn({72});
        const auto a = quantize(x, how, {}), b = quantize(w, how, {});
        QuantizedRowChunks chunks{.list = two_chunks(x, how, a), .rows = 90, .min_block_rows = 1};
        int parts = 0, progressed = 0;
        chunks.ready = [&](int chunk, int64_t from) {
          ++parts;
          return chunk == 0 ? std::min<int64_t>(40, from + 32) : std::min<int64_t>(50, from == 0 ? 1 : from + 33);
        };
        chunks.progress = [&] { ++progressed; };
        const auto y =
            quantized_gemm(chunks, {b}, {.scale = 0.5, .bias = bias, .dtype = at::kFloat}).out.to(at::kDouble);
        const auto left = dequantize(a, false, at::kFloat).to(at::kDouble),
                   right = dequantize(b, false, at::kFloat).to(at::kDouble);
        const auto bound = (left.abs().matmul(right.abs().t()) + bias.abs()) * (310 * std::ldexp(1, -24));
        EXPECT_TRUE((y - (left.matmul(right.t()) * 0.5 + bias)).abs().le(bound).all().item<bool>());
        EXPECT_GE(parts, 5);
        EXPECT_GT(progressed, 0);
      }
    }
  }
}

TEST(Quantize, GemmOfPartsTakesScalesBeyondBfloat16) {
  at::manual_seed(3);
  const Quantization mxfp8{.scale_format = ScaleFormat::e8m0, .block = 32};
  for (const double value : {std::exp2(-126), 3e38}) {
    auto x = at::randn({90, 64});
    x.narrow(0, 60, 1).fill_(value);  // one row of the second chunk
    const auto a = quantize(x, mxfp8, {}), b = quantize(at::randn({48, 64}) * 1e-3, mxfp8, {});
    const QuantizedRowChunks chunks{.list = two_chunks(x, mxfp8, a), .rows = 90};
    const auto y = quantized_gemm(chunks, {b}, {.dtype = at::kFloat}).out,
               expected = quantized_gemm({a}, {b}, {.dtype = at::kFloat}).out;
    EXPECT_TRUE(at::allclose(y, expected, 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(y[60], expected[60], 1e-5, 0));
  }
}

TEST(Quantize, GemmOfNoRowsIsEmpty) {
  const auto b = quantize(at::randn({48, 64}), {}, {});
  const auto none = quantize(at::randn({0, 64}), {}, {.amax = at::full({1}, 1.0, at::kFloat)});
  EXPECT_EQ(quantized_gemm({.list = {{none, 0}, {none, 0}}, .rows = 0}, {b}, {}).out.sizes(), at::IntArrayRef({0, 48}));
}

}  // namespace
}  // namespace weft::kernels
