#pragma once
#include <ATen/cpu/vec/vec.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

#ifdef __x86_64__
#include "weft/kernels/cpu/registers_x86.h"
#else
#include "weft/kernels/cpu/registers_neon.h"
#endif

// Loads and stores of float32, bfloat16 and float16 as vectors of float. Included only by files compiled for one
// instruction set: everything here is in the namespace of that set.

namespace weft::kernels::CPU_CAPABILITY {

inline constexpr int64_t kVecSize = Vec::size();

template <class T>
Vec widen(Half16 bits) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    return widen_bf16(bits);
  } else {
    return widen_fp16(bits);
  }
}

/// Rounds to nearest even.
template <class T>
Half16 narrow(const Vec& v) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    return narrow_bf16(v);
  } else {
    return narrow_fp16(v);
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
    return widen<T>(load16(p, count));
  }
}

template <class T>
void write(T* p, const Vec& v, int64_t count) {
  if (count == kVecSize) return write(p, v);
  if constexpr (std::is_same_v<T, float>) {
    v.store(p, static_cast<int>(count));
  } else {
    store16(p, narrow<T>(v), count);
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

/// v as `dtype` holds it.
inline Vec rounded(at::ScalarType dtype, const Vec& v) {
  switch (dtype) {
    case at::kBFloat16:
      return widen<at::BFloat16>(narrow<at::BFloat16>(v));
    case at::kHalf:
      return widen<at::Half>(narrow<at::Half>(v));
    default:
      return v;
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

}  // namespace weft::kernels::CPU_CAPABILITY
