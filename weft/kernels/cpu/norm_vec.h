#pragma once
#include <cmath>
#include <utility>

#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"

namespace weft::kernels::CPU_CAPABILITY {

/// Σ term(i, count) over the vectors of a row, in four independent dependency chains.
template <class F>
[[gnu::always_inline]] inline float sum_row(int64_t n, const F& term) {
  constexpr std::integral_constant<int64_t, kVecSize> kFull;
  Vec a(0.F), b(0.F), c(0.F), d(0.F);
  int64_t i = 0;
  for (; i + 4 * kVecSize <= n; i += 4 * kVecSize) {
    a = a + term(i, kFull), b = b + term(i + kVecSize, kFull);
    c = c + term(i + 2 * kVecSize, kFull), d = d + term(i + 3 * kVecSize, kFull);
  }
  for_each_vector(n - i, [&](int64_t j, auto count) { a = a + term(i + j, count); });
  return sum_lanes((a + b) + (c + d));
}

/// y = (x - mean)·rstd·γ + β.
template <class T>
void norm_forward_rows(const NormCall& c, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(c.x) + row * c.columns;
    T* y = static_cast<T*>(c.out) + row * c.columns;
    float mean = 0;
    if (c.centered) {
      const float sum = sum_row(c.columns, [&](int64_t i, auto count) { return read(x + i, count); });
      mean = static_cast<float>(sum / c.divisor);
      if (c.mean) c.mean[row] = mean;
    }
    const Vec mean_vec(mean);
    const float squares = sum_row(c.columns, [&](int64_t i, auto count) {
      const Vec d = mask_lanes(read(x + i, count) - mean_vec, count);
      return d * d;
    });
    const auto rstd = static_cast<float>(1 / std::sqrt(squares / c.divisor + c.eps));
    if (c.rstd) c.rstd[row] = rstd;
    const Vec factor(rstd);
    for_each_vector(c.columns, [&](int64_t i, auto count) {
      Vec v = (read(x + i, count) - mean_vec) * factor;
      if (c.gamma) v = v * read(c.gamma + i, count);
      if (c.beta) v = v + read(c.beta + i, count);
      write(y + i, v, count);
    });
  }
}

/// One row in backward: x̂ = (x - mean)·rstd, dy, and g = dy·γ.
template <class T>
struct NormRow {
  const NormCall& c;
  int64_t offset;  // of its first element
  Vec mean, rstd;

  NormRow(const NormCall& c, int64_t row)
      : c(c), offset(row * c.columns), mean(c.mean ? c.mean[row] : 0.F), rstd(c.rstd[row]) {}
  template <class Count>
  Vec x_hat(int64_t i, Count count) const {
    return (read(static_cast<const T*>(c.x) + offset + i, count) - mean) * rstd;
  }
  template <class Count>
  Vec dy(int64_t i, Count count) const {
    return read(c.dy_dtype, c.dy, offset + i, count);
  }
  template <class Count>
  Vec times_gamma(const Vec& grad, int64_t i, Count count) const {
    return c.gamma ? grad * read(c.gamma + i, count) : grad;
  }
};

/// mean_g = Σg/n, or 0 if not centered, and mean_gx = Σ(g·x̂)/n.
struct RowMeans {
  Vec mean_g{0.F}, mean_gx{0.F};
  template <class T>
  explicit RowMeans(const NormRow<T>& row) {
    Vec sum(0.F), dot(0.F), other_sum(0.F), other_dot(0.F);  // two independent chains each
    for_each_vector(row.c.columns, [&](int64_t i, auto count) {
      const Vec g = row.times_gamma(row.dy(i, count), i, count);
      sum = sum + g;
      dot = fma(g, row.x_hat(i, count), dot);
      std::swap(sum, other_sum), std::swap(dot, other_dot);
    });
    const auto mean_of = [&](const Vec& v) { return Vec(static_cast<float>(sum_lanes(v) / row.c.divisor)); };
    if (row.c.centered) mean_g = mean_of(sum + other_sum);
    mean_gx = mean_of(dot + other_dot);
  }
};

/// dx = rstd·(g - mean_g - x̂·mean_gx) + addend;  dγ += dy·x̂;  dβ += dy.
template <class T>
void norm_backward_rows(const NormCall& c, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    const NormRow<T> row(c, index);
    const RowMeans p(row);
    for_each_vector(c.columns, [&](int64_t i, auto count) {
      const Vec x_hat = row.x_hat(i, count), dy = row.dy(i, count);
      if (c.out) {
        Vec dx = row.rstd * (row.times_gamma(dy, i, count) - p.mean_g - x_hat * p.mean_gx);
        if (c.addend) dx = dx + read(c.addend_dtype, c.addend, row.offset + i, count);
        write(static_cast<T*>(c.out) + row.offset + i, dx, count);
      }
      if (c.dgamma) write(c.dgamma + i, fma(dy, x_hat, read(c.dgamma + i, count)), count);
      if (c.dbeta) write(c.dbeta + i, dy + read(c.dbeta + i, count), count);
    });
  }
}

static void norm_forward(const NormCall& c, int64_t begin, int64_t end) {
  with_dtype(c.dtype, [&](auto t) { norm_forward_rows<decltype(t)>(c, begin, end); });
}

static void norm_backward(const NormCall& c, int64_t begin, int64_t end) {
  with_dtype(c.dtype, [&](auto t) { norm_backward_rows<decltype(t)>(c, begin, end); });
}

const NormLoops norm_loops{norm_forward, norm_backward};

}  // namespace weft::kernels::CPU_CAPABILITY
