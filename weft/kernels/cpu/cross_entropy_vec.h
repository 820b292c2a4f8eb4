#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "weft/kernels/cpu/act_vec.h"
#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cross_entropy.h"

namespace weft::kernels::CPU_CAPABILITY {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// e^d for d ≤ 0: 0 below -kExpBound, NaN for NaN.
inline Vec exp_below_zero(const Vec& d) {
  const Vec low(-kExpBound);
  const Vec e = exp_neg<ActPrecision::float32>(clamp_low(d, -kExpBound).neg());
  return Vec::blendv(e, Vec(0.F), d < low);
}

/// The largest lane; NaN if there is one.
inline float max_lanes(const Vec& v) {
  std::array<float, kVecSize> lanes;
  v.store(lanes.data());
  float max = lanes[0];
  for (const float lane : lanes) max = lane > max || std::isnan(lane) ? lane : max;
  return max;
}

/// Calls run(chain, i, count) for the vectors of [0, n), where chain is 0 to 3 in turn: independent dependency chains.
template <class F>
[[gnu::always_inline]] inline void for_each_vector_in_chains(int64_t n, F&& run) {
  constexpr std::integral_constant<int64_t, kVecSize> kFull;
  int64_t i = 0;
  for (; i + 4 * kVecSize <= n; i += 4 * kVecSize) {
    run(0, i, kFull), run(1, i + kVecSize, kFull);
    run(2, i + 2 * kVecSize, kFull), run(3, i + 3 * kVecSize, kFull);
  }
  for_each_vector(n - i, [&](int64_t j, auto count) { run(0, i + j, count); });
}

template <class T>
float max_of(const T* x, int64_t n) {
  std::array<Vec, 4> max;
  max.fill(Vec(-kInfinity));
  for_each_vector_in_chains(n, [&](int chain, int64_t i, auto count) {
    max[chain] = at::vec::maximum(max[chain], mask_lanes(read(x + i, count), count, -kInfinity));
  });
  return max_lanes(at::vec::maximum(at::vec::maximum(max[0], max[1]), at::vec::maximum(max[2], max[3])));
}

/// Σ exp(x - max) and, if `kMean`, Σ (x/2 - max/2)/classes: halves, so that no finite x overflows.
struct RowSums {
  float exp = 0, half_mean = 0;
};
template <bool kMean, class T>
RowSums sums_of(const T* x, int64_t n, float max, float inv_classes) {
  const Vec m(max), half(0.5F), minus_half_max(-0.5F * max), factor(inv_classes);
  std::array<Vec, 4> exp, mean;
  exp.fill(Vec(0.F)), mean.fill(Vec(0.F));
  for_each_vector_in_chains(n, [&](int chain, int64_t i, auto count) {
    const Vec value = read(x + i, count);
    exp[chain] = exp[chain] + mask_lanes(exp_below_zero(value - m), count);
    if constexpr (kMean) mean[chain] = fma(mask_lanes(fma(value, half, minus_half_max), count), factor, mean[chain]);
  });
  const auto total = [](const std::array<Vec, 4>& v) { return sum_lanes((v[0] + v[1]) + (v[2] + v[3])); };
  return {total(exp), kMean ? total(mean) : 0};
}

/// One pass over the row, in blocks that stay in L1: the sums are rescaled when a block raises the maximum.
template <bool kMean, class T>
void write_partials(const T* x, int64_t n, double inv_classes, float* partials) {
  constexpr int64_t kBlock = 2048;
  float max = -kInfinity;
  double exp = 0, half_mean = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const auto size = std::min(kBlock, n - begin);
    const float block_max = max_of(x + begin, size);
    const float next = block_max > max || std::isnan(block_max) ? block_max : max;
    if (next == -kInfinity) {  // x - max would be NaN
      half_mean = -kInfinity;
      continue;
    }
    if (next != max) {
      const double lower = static_cast<double>(max) - next;
      exp *= max == -kInfinity ? 0 : std::exp(lower);
      if (begin > 0) half_mean += static_cast<double>(begin) * inv_classes * lower / 2;
      max = next;
    }
    const auto sums = sums_of<kMean>(x + begin, size, max, static_cast<float>(inv_classes));
    exp += sums.exp, half_mean += sums.half_mean;
  }
  partials[kPartialMax] = max;
  partials[kPartialSumExp] = static_cast<float>(exp);
  partials[kPartialHalfMean] = static_cast<float>(half_mean);
  partials[kPartialColumns] = static_cast<float>(n);
}

/// The column of the row's target, or -1 if another rank has it. Any target is safe.
inline int64_t target_column(const CrossEntropyCall& c, int64_t row) {
  const auto target = c.targets[row];
  return target >= c.first_class && target < c.first_class + c.columns ? target - c.first_class : -1;
}

template <class T>
void cross_entropy_forward_rows(const CrossEntropyCall& c, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    float* partials = c.partials + row * kNumPartials;
    if (c.targets[row] == c.ignore_index) {
      std::fill_n(partials, static_cast<int64_t>(kNumPartials), 0.F);
      partials[kPartialSumExp] = 1;
      partials[kPartialColumns] = static_cast<float>(c.columns);
      continue;
    }
    const T* x = static_cast<const T*>(c.logits) + row * c.columns;
    if (c.label_smoothing != 0)
      write_partials<true>(x, c.columns, c.inv_classes, partials);
    else
      write_partials<false>(x, c.columns, c.inv_classes, partials);
    const auto column = target_column(c, row);
    partials[kPartialTarget] = column >= 0 ? static_cast<float>(x[column]) : 0;
  }
}

template <class T>
void cross_entropy_backward_rows(const CrossEntropyCall& c, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* dx = static_cast<T*>(c.out) + row * c.columns;
    if (c.targets[row] == c.ignore_index) {
      std::fill_n(dx, c.columns, T(0));
      continue;
    }
    const T* x = static_cast<const T*>(c.logits) + row * c.columns;
    const float max = c.statistics[2 * row];
    const double sum = c.statistics[2 * row + 1], g = c.grad[row];
    const double of_softmax = c.z_loss != 0 ? g * (1 + 2 * c.z_loss * (max + std::log(sum))) : g;
    const double factor = of_softmax / sum, uniform = g * c.label_smoothing * c.inv_classes;
    const Vec m(max), f(static_cast<float>(factor)), u(static_cast<float>(-uniform));
    for_each_vector(c.columns, [&](int64_t i, auto count) {
      write(dx + i, fma(exp_below_zero(read(x + i, count) - m), f, u), count);
    });
    const auto column = target_column(c, row);
    if (column < 0) continue;
    const double p = std::exp(static_cast<double>(static_cast<float>(x[column])) - max);
    dx[column] = static_cast<T>(static_cast<float>(p * factor - uniform - g * (1 - c.label_smoothing)));
  }
}

static void cross_entropy_forward_loop(const CrossEntropyCall& c, int64_t begin, int64_t end) {
  with_dtype(c.dtype, [&](auto t) { cross_entropy_forward_rows<decltype(t)>(c, begin, end); });
}

static void cross_entropy_backward_loop(const CrossEntropyCall& c, int64_t begin, int64_t end) {
  with_dtype(c.dtype, [&](auto t) { cross_entropy_backward_rows<decltype(t)>(c, begin, end); });
}

const CrossEntropyLoops cross_entropy_loops{cross_entropy_forward_loop, cross_entropy_backward_loop};

}  // namespace weft::kernels::CPU_CAPABILITY
