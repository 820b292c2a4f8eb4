#pragma once
#include <ATen/cpu/vec/vec.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

// Loads and stores of float32, bfloat16 and float16 as vectors of float. Included only by files compiled for one
// instruction set: everything here is in the namespace of that set.

namespace weft::kernels::CPU_CAPABILITY {

using Vec = at::vec::Vectorized<float>;
inline constexpr int64_t kVecSize = Vec::size();

#ifdef CPU_CAPABILITY_AVX512
using Reg = __m512;
using Half16 = __m256i;  // kVecSize elements of 16 bits
inline Half16 load16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store16(void* p, Half16 v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1U << count) - 1); }
#else
using Reg = __m256;
using Half16 = __m128i;
inline Half16 load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store16(void* p, Half16 v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }
#endif

template <class T>
Vec widen(Half16 bits) {
  Reg out;
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    at::vec::cvtbf16_fp32(bits, out);
  } else {
    at::vec::cvtfp16_fp32(bits, out);
  }
  return out;
}

/// Rounds to nearest even.
template <class T>
Half16 narrow(const Vec& v) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    return at::vec::cvtfp32_bf16(Reg(v));
  } else {
    return at::vec::cvtfp32_fp16(Reg(v));
  }
}

template <class T>
Vec read(const T* p) {
  if constexpr (std::is_same_v<T, float>) {
    return Vec::loadu(p);
  } else {
    return widen<T>(load16(p));
  }
}

template <class T>
void write(T* p, const Vec& v) {
  if constexpr (std::is_same_v<T, float>) {
    v.store(p);
  } else {
    store16(p, narrow<T>(v));
  }
}

/// Reads the first `count` (1 to kVecSize) elements; the other lanes are 0, and their memory is not accessed.
template <class T>
Vec read(const T* p, int64_t count) {
  if (count == kVecSize) return read(p);
  if constexpr (std::is_same_v<T, float>) {
    return Vec::loadu(p, count);
  } else {
#ifdef CPU_CAPABILITY_AVX512
    return widen<T>(_mm256_maskz_loadu_epi16(first_lanes(count), p));
#else
    Half16 bits = _mm_setzero_si128();
    std::memcpy(&bits, p, static_cast<size_t>(count) * sizeof(T));
    return widen<T>(bits);
#endif
  }
}

template <class T>
void write(T* p, const Vec& v, int64_t count) {
  if (count == kVecSize) return write(p, v);
  if constexpr (std::is_same_v<T, float>) {
    v.store(p, static_cast<int>(count));
  } else {
#ifdef CPU_CAPABILITY_AVX512
    _mm256_mask_storeu_epi16(p, first_lanes(count), narrow<T>(v));
#else
    const Half16 bits = narrow<T>(v);
    std::memcpy(p, &bits, static_cast<size_t>(count) * sizeof(T));
#endif
  }
}

/// Reads `count` elements from index i on, of a dtype known at run time.
template <class Count>
Vec read(at::ScalarType dtype, const void* p, int64_t i, Count count) {
  switch (dtype) {
    case at::kBFloat16:
      return read(static_cast<const at::BFloat16*>(p) + i, count);
    case at::kHalf:
      return read(static_cast<const at::Half*>(p) + i, count);
    default:
      return read(static_cast<const float*>(p) + i, count);
  }
}

template <class Count>
void write(at::ScalarType dtype, void* p, int64_t i, const Vec& v, Count count) {
  switch (dtype) {
    case at::kBFloat16:
      return write(static_cast<at::BFloat16*>(p) + i, v, count);
    case at::kHalf:
      return write(static_cast<at::Half*>(p) + i, v, count);
    default:
      return write(static_cast<float*>(p) + i, v, count);
  }
}

/// Calls run(T{}) with the C++ type of `dtype`.
template <class F>
void with_dtype(at::ScalarType dtype, F&& run) {
  switch (dtype) {
    case at::kBFloat16:
      return run(at::BFloat16{});
    case at::kHalf:
      return run(at::Half{});
    default:
      return run(float{});
  }
}

/// Calls run(i, count) for consecutive ranges of [0, n). `count` is a compile-time kVecSize except for the tail.
/// Inlined, so that what `run` captures by reference can stay in registers.
template <class F>
[[gnu::always_inline]] inline void for_each_vector(int64_t n, F&& run) {
  int64_t i = 0;
  for (; i + kVecSize <= n; i += kVecSize) run(i, std::integral_constant<int64_t, kVecSize>{});
  if (i < n) run(i, n - i);
}

/// v in its first `count` lanes, `rest` in the others.
template <class Count>
Vec mask_lanes(const Vec& v, Count count, float rest = 0) {
  return count == kVecSize ? v : Vec::set(Vec(rest), v, count);
}

/// a·b + c, rounded once.
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) { return at::vec::fmadd(a, b, c); }

/// The sum of all lanes, in a fixed order.
inline float sum_lanes(const Vec& v) {
#ifdef CPU_CAPABILITY_AVX512
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  const __m256 half = v;
#endif
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

}  // namespace weft::kernels::CPU_CAPABILITY
