#pragma once
#include <array>

#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"

namespace weft::kernels::CPU_CAPABILITY {

/// The factor of row i in all lanes; 1 without factors.
inline Vec row_scale(const GroupRows& g, int64_t i) {
  float scale = 1;
  if (g.scales)
    with_dtype(g.scales.dtype, [&](auto t) {
      scale = static_cast<float>(static_cast<const decltype(t)*>(g.scales.data)[i * g.scales.ld]);
    });
  return scale;
}

static void add_bias(const GroupRows& g, const Rows& out) {
  for (int64_t i = 0; i < g.rows; ++i) {
    const Vec scale = row_scale(g, i);
    each_vector(g.columns, [&](int64_t j, auto count) {
      Vec v = read(g.x.dtype, g.x.data, i * g.x.ld + j, count);
      if (g.bias) v = fma(scale, read(g.bias.dtype, g.bias.data, j, count), v);
      write(out.dtype, out.data, i * out.ld + j, v, count);
    });
  }
}

/// kVectors vectors of columns from j on; `count` values of the last.
template <int kVectors, class T, class Count>
void sum_columns(const GroupRows& g, const Rows& out, int64_t j, Count count) {
  std::array<Vec, kVectors> sums;
  sums.fill(Vec(0.F));
  const T* x = static_cast<const T*>(g.x.data) + j;
  for (int64_t i = 0; i < g.rows; ++i, x += g.x.ld) {
    const Vec scale = row_scale(g, i);
    for (int v = 0; v < kVectors; ++v) sums[v] = fma(scale, read(x + v * kWidth, count), sums[v]);
  }
  for (int v = 0; v < kVectors; ++v) write(out.dtype, out.data, j + v * kWidth, sums[v], count);
}

static void sum_group(const GroupRows& g, const Rows& out, int64_t begin, int64_t end) {
  constexpr int kVectors = 4;
  with_dtype(g.x.dtype, [&](auto t) {
    using T = decltype(t);
    int64_t j = begin;
    for (; j + kVectors * kWidth <= end; j += kVectors * kWidth)
      sum_columns<kVectors, T>(g, out, j, std::integral_constant<int64_t, kWidth>{});
    each_vector(end - j, [&](int64_t i, auto count) { sum_columns<1, T>(g, out, j + i, count); });
  });
}

/// Dots of kRows rows from row i on.
template <int kRows, class T>
void dot_rows(const GroupRows& g, float* out, int64_t i) {
  const T* x = static_cast<const T*>(g.x.data) + i * g.x.ld;
  std::array<Vec, kRows> sums;
  sums.fill(Vec(0.F));
  each_vector(g.columns, [&](int64_t j, auto count) {
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

const GroupLoops group_loops{add_bias, sum_group, dot_bias};

}  // namespace weft::kernels::CPU_CAPABILITY
