#pragma once
#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <cstring>

// What at::vec lacks on x86-64, in AVX-512 or AVX2 instructions. Included by io_vec.h.

namespace weft::kernels::CPU_CAPABILITY {

using Vec = at::vec::Vectorized<float>;

#ifdef CPU_CAPABILITY_AVX512

using Reg = __m512;
using IntReg = __m512i;
using Half16 = __m256i;  // Vec::size() elements of 16 bits
inline Half16 load16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store16(void* p, Half16 v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1U << count) - 1); }
/// The first `count` elements; the others are 0, and their memory is not accessed.
inline Half16 load16(const void* p, int64_t count) { return _mm256_maskz_loadu_epi16(first_lanes(count), p); }
inline void store16(void* p, Half16 v, int64_t count) { _mm256_mask_storeu_epi16(p, first_lanes(count), v); }

/// 16 bytes, of which the first Vec::size() are converted.
inline Vec from_bytes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
/// t - floor(t).
inline Vec fraction(const Vec& t) { return _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF); }
/// p·2^floor(t), for any t.
inline Vec multiply_exp2(const Vec& p, const Vec& t) { return _mm512_scalef_ps(p, t); }
/// 1/d, to 14 bits.
inline Vec approximate_reciprocal(const Vec& d) { return _mm512_rcp14_ps(d); }
/// 1/d for 1 ≤ d ≤ 2^126.
inline Vec exact_reciprocal(const Vec& d) {
  const __m512 r = _mm512_rcp14_ps(d);  // one Newton step gives 28 bits
  return _mm512_fmadd_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(1)), r);
}
/// The larger of each pair of lanes; none is NaN.
inline Vec larger(const Vec& a, const Vec& b) { return _mm512_max_ps(a, b); }
inline float max_lane(const Vec& v) { return _mm512_reduce_max_ps(v); }
/// The high halves of 32-bit products.
inline IntReg multiply_high(IntReg x, uint32_t factor) {
  const __m512i y = _mm512_set1_epi64(factor);
  const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
  return _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
inline __m256 add_halves(const Vec& v) {
  return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

#else

using Reg = __m256;
using IntReg = __m256i;
using Half16 = __m128i;
inline Half16 load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store16(void* p, Half16 v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }
inline Half16 load16(const void* p, int64_t count) {
  Half16 bits = _mm_setzero_si128();
  std::memcpy(&bits, p, static_cast<size_t>(count) * 2);
  return bits;
}
inline void store16(void* p, Half16 v, int64_t count) { std::memcpy(p, &v, static_cast<size_t>(count) * 2); }

inline Vec from_bytes(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
inline Vec fraction(const Vec& t) { return t - t.floor(); }
/// For |t| ≤ 126.
inline Vec multiply_exp2(const Vec& p, const Vec& t) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(t.floor()), _mm256_set1_epi32(127));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Vec exact_reciprocal(const Vec& d) { return _mm256_div_ps(_mm256_set1_ps(1), d); }
inline Vec approximate_reciprocal(const Vec& d) { return exact_reciprocal(d); }
inline Vec larger(const Vec& a, const Vec& b) { return _mm256_max_ps(a, b); }
inline float max_lane(const Vec& v) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
inline IntReg multiply_high(IntReg x, uint32_t factor) {
  const __m256i y = _mm256_set1_epi64x(factor);
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
inline __m256 add_halves(const Vec& v) { return v; }

#endif

inline Reg widen_bf16(Half16 bits) {
  Reg out;
  at::vec::cvtbf16_fp32(bits, out);
  return out;
}
inline Reg widen_fp16(Half16 bits) {
  Reg out;
  at::vec::cvtfp16_fp32(bits, out);
  return out;
}
/// Round to nearest even.
inline Half16 narrow_bf16(Reg v) { return at::vec::cvtfp32_bf16(v); }
inline Half16 narrow_fp16(Reg v) { return at::vec::cvtfp32_fp16(v); }

/// The sum of all lanes, in a fixed order.
inline float sum_lanes(const Vec& v) {
  const __m256 half = add_halves(v);
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

/// 16 booleans, of which the first Vec::size() are converted to 0 and 1.
inline Vec from_bools(const void* aligned) { return from_bytes(_mm_load_si128(static_cast<const __m128i*>(aligned))); }

/// 16 codes of 4 bits as 8 bytes, the first code of a pair in the low half.
inline uint64_t pack_pairs(__m128i codes) {
  const __m128i pairs = _mm_maddubs_epi16(codes, _mm_set1_epi16(0x1001));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(pairs, pairs)));
}
inline __m128i unpack_pairs(uint64_t packed) {
  const __m128i bytes = _mm_cvtsi64_si128(static_cast<int64_t>(packed));
  const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
  return _mm_unpacklo_epi8(low, high);
}
using ByteReg = __m128i;

}  // namespace weft::kernels::CPU_CAPABILITY
