#pragma once
#include <array>

#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu/small_vec.h"

namespace weft::kernels::CPU_CAPABILITY {

/// The scale of row i in all lanes; 1 without scales.
inline Vec row_scale(const RowMajorView& scales, int64_t i) {
  float scale = 1;
  if (scales)
    with_dtype(scales.dtype, [&](auto t) {
      scale = static_cast<float>(static_cast<const decltype(t)*>(scales.data)[i * scales.ld]);
    });
  return scale;
}

/// A B with inputs of type T and output of type O.
template <class T, class O>
void group_gemm_typed(const StridedMatrix& a, const StridedMatrix& b, float* scratch, const GroupOutput& to) {
  for_each_small_row<T>(a, b, scratch, [&](int64_t i, int64_t j, Vec v, auto count) {
    O* out = static_cast<O*>(to.out.data) + i * to.out.ld + j;
    if (to.bias) v = fma(row_scale(to.scales, i), read(to.bias.dtype, to.bias.data, j, count), v);
    if (to.accumulate) v = v + read(out, count);
    write(out, v, count);
  });
}

static void group_gemm(at::ScalarType dtype, const StridedMatrix& a, const StridedMatrix& b, float* scratch,
                       const GroupOutput& to) {
  with_dtype(dtype, [&](auto t) {
    with_dtype(to.out.dtype, [&](auto o) { group_gemm_typed<decltype(t), decltype(o)>(a, b, scratch, to); });
  });
}

/// Sums kVectors vectors of columns from j on, with `count` elements in each.
template <int kVectors, class T, class Count>
void sum_columns(const GroupRows& g, const RowMajorView& out, int64_t j, Count count) {
  std::array<Vec, kVectors> sums;
  sums.fill(Vec(0.F));
  const T* x = static_cast<const T*>(g.x.data) + j;
  for (int64_t i = 0; i < g.rows; ++i, x += g.x.ld) {
    const Vec scale = row_scale(g.scales, i);
    for (int v = 0; v < kVectors; ++v) sums[v] = fma(scale, read(x + v * kVecSize, count), sums[v]);
  }
  for (int v = 0; v < kVectors; ++v) write(out.dtype, out.data, j + v * kVecSize, sums[v], count);
}

static void sum_group(const GroupRows& g, const RowMajorView& out, int64_t begin, int64_t end) {
  constexpr int kVectors = 4;
  with_dtype(g.x.dtype, [&](auto t) {
    using T = decltype(t);
    int64_t j = begin;
    for (; j + kVectors * kVecSize <= end; j += kVectors * kVecSize)
      sum_columns<kVectors, T>(g, out, j, std::integral_constant<int64_t, kVecSize>{});
    for_each_vector(end - j, [&](int64_t i, auto count) { sum_columns<1, T>(g, out, j + i, count); });
  });
}

/// Dot products of the bias with kRows rows from row i on.
template <int kRows, class T>
void dot_rows(const GroupRows& g, float* out, int64_t i) {
  const T* x = static_cast<const T*>(g.x.data) + i * g.x.ld;
  std::array<Vec, kRows> sums;
  sums.fill(Vec(0.F));
  for_each_vector(g.columns, [&](int64_t j, auto count) {
    const Vec bias = read(g.bias.dtype, g.bias.data, j, count);
    for (int r = 0; r < kRows; ++r) sums[r] = fma(read(x + r * g.x.ld + j, count), bias, sums[r]);
  });
  for (int r = 0; r < kRows; ++r) out[i + r] = sum_lanes(sums[r]);
}

static void dot_bias(const GroupRows& g, float* out, int64_t begin, int64_t end) {
  with_dtype(g.x.dtype, [&](auto t) {
    using T = decltype(t);
    int64_t i = begin;
    for (; i + 4 <= end; i += 4) dot_rows<4, T>(g, out, i);
    for (; i < end; ++i) dot_rows<1, T>(g, out, i);
  });
}

const GroupLoops group_loops{group_gemm, sum_group, dot_bias};

}  // namespace weft::kernels::CPU_CAPABILITY
