#pragma once
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "weft/core/formats.h"

// Conversions between float32 and the formats of quantized tensors, and the scales of blocks. The same code serves one
// float and vectors of floats (GCC's vector extension): F is either, and I the int32 of the same size. All arithmetic
// is float32 with one rounding per operation; compile with -ffp-contract=off.

namespace weft::kernels {

template <class F>
struct IntsOf;
template <>
struct IntsOf<float> {
  using type = int32_t;
};

#define WEFT_INLINE [[gnu::always_inline]] inline

template <class F>
WEFT_INLINE typename IntsOf<F>::type bits_of(F x) {
  return std::bit_cast<typename IntsOf<F>::type>(x);
}
template <class F>
WEFT_INLINE F from_bits(typename IntsOf<F>::type bits) {
  return std::bit_cast<F>(bits);
}
/// The same value in all lanes.
template <class F>
WEFT_INLINE F splat(float x) {
  return F{} + x;
}
template <class I>
WEFT_INLINE I splat_int(int32_t x) {
  return I{} + x;
}
/// The values of integers below 2^24.
template <class F>
WEFT_INLINE F to_float(typename IntsOf<F>::type i) {
  if constexpr (std::is_same_v<F, float>) {
    return static_cast<float>(i);
  } else {
    return __builtin_convertvector(i, F);
  }
}

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kMagnitudeBits = 0x7fffffff;
/// 2^exponent, a normal number.
constexpr float power_of_two(int exponent) { return std::bit_cast<float>((exponent + 127) << 23); }

/// The larger of `amax` and |x|; a NaN in x is ignored.
template <class F>
WEFT_INLINE F max_magnitude(F amax, F x) {
  const F magnitude = from_bits<F>(bits_of(x) & kMagnitudeBits);
  return magnitude > amax ? magnitude : amax;
}

// ---- Values ------------------------------------------------------------------------------------------------------

/// The code of x: rounded to nearest even, saturated to the largest finite value, infinities too. Keeps the sign of
/// zero.
template <Format kCodes, class F>
WEFT_INLINE typename IntsOf<F>::type encode(F x) {
  using I = typename IntsOf<F>::type;
  constexpr auto t = traits_of(kCodes);
  constexpr int shift = 23 - t.mantissa_bits;
  // Adding `magic`, whose last bit has the value of the smallest subnormal number, rounds to a multiple of that number.
  constexpr float magic = power_of_two(24 - t.bias - t.mantissa_bits);
  constexpr int32_t max_bits = std::bit_cast<int32_t>(t.max), min_normal = (128 - t.bias) << 23;
  const I bits = bits_of(x), magnitude = bits & kMagnitudeBits;
  const I clamped = magnitude < splat_int<I>(max_bits) ? magnitude : splat_int<I>(max_bits);
  const I subnormal = bits_of(from_bits<F>(clamped) + splat<F>(magic)) - std::bit_cast<int32_t>(magic);
  const I half_ulp = ((clamped >> shift) & 1) + ((1 << (shift - 1)) - 1);
  const I normal = ((clamped + half_ulp) >> shift) - ((127 - t.bias) << t.mantissa_bits);
  const I code = clamped < splat_int<I>(min_normal) ? subnormal : normal;
  const I sign = (bits >> (31 - t.sign_bit)) & (1 << t.sign_bit);
  return magnitude > splat_int<I>(kInfinityBits) ? splat_int<I>(t.nan) : code | sign;
}

/// The value of a code.
template <Format kCodes, class F>
WEFT_INLINE F decode(typename IntsOf<F>::type code) {
  using I = typename IntsOf<F>::type;
  constexpr auto t = traits_of(kCodes);
  constexpr int shift = 23 - t.mantissa_bits;
  const I magnitude = code & ((1 << t.sign_bit) - 1);
  const F subnormal = to_float<F>(magnitude) * splat<F>(power_of_two(1 - t.bias - t.mantissa_bits));
  I bits = (magnitude + ((127 - t.bias) << t.mantissa_bits)) << shift;
  bits = magnitude < splat_int<I>(1 << t.mantissa_bits) ? bits_of(subnormal) : bits;
  if constexpr (kCodes == Format::e4m3)
    bits = magnitude == splat_int<I>(0x7f) ? splat_int<I>(kInfinityBits | 0x400000) : bits;
  if constexpr (kCodes == Format::e5m2)
    bits = magnitude >= splat_int<I>(0x7c) ? ((magnitude & 3) << shift) | kInfinityBits : bits;
  return from_bits<F>(bits | ((code << (31 - t.sign_bit)) & INT32_MIN));
}

/// The E2M1 code of x, rounded up in magnitude with the probability of its distance to the lower neighbour: `u` is
/// uniform in [0, 1). |x| + u·step, with one rounding, is rounded down to the grid.
template <class F>
WEFT_INLINE typename IntsOf<F>::type encode_stochastic(F x, F u) {
  using I = typename IntsOf<F>::type;
  const I bits = bits_of(x), magnitude = bits & kMagnitudeBits;
  const F a = from_bits<F>(magnitude < bits_of(splat<F>(6)) ? magnitude : bits_of(splat<F>(6)));
  const F step = a < splat<F>(2) ? splat<F>(0.5F) : a < splat<F>(4) ? splat<F>(1) : splat<F>(2);
  F t;
  if constexpr (std::is_same_v<F, float>) {
    t = __builtin_fmaf(u, step, a);
  } else {
    t = a + u * step;  // the steps are powers of two: u·step is exact, and the sum is rounded once
  }
  const F capped = t < splat<F>(6) ? t : splat<F>(6);
  // Rounding down to one mantissa bit drops the other bits; below 1 the grid has multiples of 0.5.
  const I normal = (bits_of(capped) >> 22) - (126 << 1);
  const I code = capped < splat<F>(1) ? (capped < splat<F>(0.5F) ? splat_int<I>(0) : splat_int<I>(1)) : normal;
  return magnitude > splat_int<I>(kInfinityBits) ? splat_int<I>(7) : code | ((bits >> 28) & 8);
}

// ---- Hadamard transform --------------------------------------------------------------------------------------------

constexpr uint32_t kHadamardSigns = 0xd7e8;  // bit i: value i is negated

/// x diag(s) H in place for 16 values, each a number, a vector or a tensor; H is Sylvester's matrix.
template <class T>
WEFT_INLINE void hadamard_sums(T* values) {
  for (int i = 0; i < 16; ++i)
    if ((kHadamardSigns >> i) & 1) values[i] = -values[i];
  for (int stride = 1; stride < 16; stride *= 2)
    for (int i = 0; i < 16; ++i) {
      if (i & stride) continue;
      const T a = values[i], b = values[i + stride];
      values[i] = a + b, values[i + stride] = a - b;
    }
}

// ---- Scales ------------------------------------------------------------------------------------------------------

/// The float32 scale that maps `amax` to `max`: 1 if amax is 0 or infinite, at most `limit`.
template <class F>
WEFT_INLINE F float32_scale(F amax, float max, float epsilon, float limit, bool power_of_two) {
  amax = amax < splat<F>(epsilon) ? splat<F>(epsilon) : amax;
  F scale = splat<F>(max) / amax;
  scale = scale > splat<F>(FLT_MAX) ? splat<F>(limit) : scale;
  if (power_of_two) scale = from_bits<F>(bits_of(scale) & kInfinityBits);
  const F checked = amax > splat<F>(FLT_MAX) ? splat<F>(1) : scale;
  return amax > splat<F>(0) ? checked : splat<F>(1);
}

/// The E8M0 code of the smallest power of two ≥ amax·(1/max), with 1/max rounded to float32.
template <class F>
WEFT_INLINE typename IntsOf<F>::type e8m0_scale(F amax, float inverse_max) {
  using I = typename IntsOf<F>::type;
  const I bits = bits_of(amax * splat<F>(inverse_max));
  const I exponent = bits >> 23, rounds_up = (bits & 0x7fffff) != 0 ? splat_int<I>(1) : splat_int<I>(0);
  const I code = bits <= splat_int<I>(0x400000) ? splat_int<I>(0) : exponent + rounds_up;  // 2^-127 has code 0
  return code > splat_int<I>(254) ? splat_int<I>(254) : code;
}
/// 2^(code - 127); NaN for code 255.
template <class F>
WEFT_INLINE F decode_e8m0(typename IntsOf<F>::type code) {
  using I = typename IntsOf<F>::type;
  const I bits = code == splat_int<I>(0) ? splat_int<I>(0x400000) : code << 23;
  return from_bits<F>(code == splat_int<I>(255) ? splat_int<I>(kInfinityBits | 0x400000) : bits);
}
/// 2^(127 - code), the factor of the values of a block; `code` is at most 254.
template <class F>
WEFT_INLINE F e8m0_factor(typename IntsOf<F>::type code) {
  return decode_e8m0<F>(254 - code);
}

/// The scale of a tensor whose blocks have E4M3 scales: S = 6·bound / amax. `bound`: the largest scale of a block.
struct TwoLevelScale {
  float scale, inverse, sixth;  // S, 1/S, S/6

  WEFT_INLINE static TwoLevelScale of(float amax, float bound) {
    float scale = std::min(6 * bound / amax, FLT_MAX);
    if (amax == 0 || scale == 0) scale = 1;
    return {scale, 1 / scale, scale * (1.F / 6)};
  }
};
/// The E4M3 code of the scale of a block.
template <class F>
WEFT_INLINE typename IntsOf<F>::type e4m3_scale(F amax, F sixth) {
  return encode<Format::e4m3>(amax * sixth);  // saturates, also if the product overflows
}
/// The factor of the values of a block with E4M3 scale `scale`; FLT_MAX if the scale is 0.
template <class F>
WEFT_INLINE F e4m3_factor(F scale, F inverse) {
  const F factor = splat<F>(1) / (scale * inverse);
  return factor > splat<F>(FLT_MAX) ? splat<F>(FLT_MAX) : factor;
}

}  // namespace weft::kernels
