#pragma once
#include <algorithm>

#include "weft/kernels/cpu/act_vec.h"
#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"

namespace weft::kernels::CPU_CAPABILITY {

template <ActKind kKind, class T>
void act_forward_rows(const ActCall& c, int64_t begin, int64_t end) {
  constexpr int64_t kParts = is_gated(kKind) ? 2 : 1;
  const ActParams params(c.act);
  for (int64_t row = begin; row < end; ++row) {
    const Vec scale(c.scales ? c.scales[row] : 1.F);
    for (int64_t block = row * c.blocks; block < (row + 1) * c.blocks; ++block) {
      const T* x = static_cast<const T*>(c.x) + block * c.columns * kParts;
      T* y = static_cast<T*>(c.out) + block * c.columns;
      for_each_vector(c.columns, [&](int64_t i, auto count) {
        Vec v = read(x + i, count);
        if constexpr (is_gated(kKind)) {
          v = gated_value<kKind>(v, read(x + c.columns + i, count), params);
        } else {
          v = act_value<kKind>(v, params);
        }
        write(y + i, scale * v, count);
      });
    }
  }
}

/// Stores a gradient and adds it to the column sums.
template <class T, class Count>
void store_grad(T* dx, float* sums, const Vec& v, Count count) {
  if (dx) write(dx, v, count);
  if (sums) write(sums, read(sums, count) + v, count);
}

template <ActKind kKind, class T>
void act_backward_rows(const ActCall& c, int64_t begin, int64_t end) {
  constexpr int64_t kParts = is_gated(kKind) ? 2 : 1;
  const auto shifted = [](auto* p, int64_t by) { return p ? p + by : p; };
  const ActParams params(c.act);
  for (int64_t row = begin; row < end; ++row) {
    const Vec scale(c.scales ? c.scales[row] : 1.F);
    Vec total(0.F);
    for (int64_t block = 0; block < c.blocks; ++block) {
      const auto offset = (row * c.blocks + block) * c.columns;
      const T* x = static_cast<const T*>(c.x) + offset * kParts;
      T* dx = shifted(static_cast<T*>(c.out), offset * kParts);
      float* sums = shifted(c.column_sums, block * c.columns * kParts);
      for_each_vector(c.columns, [&](int64_t i, auto count) {
        const Vec dy = read(c.dy_dtype, c.dy, offset + i, count);
        if constexpr (is_gated(kKind)) {
          const auto j = i + c.columns;
          const auto g = gated_value_and_grads<kKind>(scale * dy, read(x + i, count), read(x + j, count), params);
          total = fma(dy, g.value, total);
          store_grad(shifted(dx, i), shifted(sums, i), g.da, count);
          store_grad(shifted(dx, j), shifted(sums, j), g.db, count);
        } else {
          const auto f = act_value_and_grad<kKind>(read(x + i, count), params);
          total = fma(dy, f.value, total);
          store_grad(shifted(dx, i), shifted(sums, i), scale * dy * f.grad, count);
        }
      });
    }
    if (c.ds) c.ds[row] = sum_lanes(total);
  }
}

/// Only dx and its column sums, for kRows rows from `row` on: each sum is loaded and stored once for all these rows.
template <ActKind kKind, class T, int kRows>
void act_backward_column_sums(const ActCall& c, const ActParams& params, int64_t row) {
  constexpr int64_t kParts = is_gated(kKind) ? 2 : 1;
  const T* x = static_cast<const T*>(c.x) + row * c.columns * kParts;
  T* dx = static_cast<T*>(c.out) + row * c.columns * kParts;
  const auto add = [&](int64_t i, const Vec& v, auto count) {
    write(c.column_sums + i, read(c.column_sums + i, count) + v, count);
  };
  for_each_vector(c.columns, [&](int64_t i, auto count) {
    Vec sum_a(0.F), sum_b(0.F);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const auto a = r * c.columns * kParts + i, b = a + c.columns;
      const Vec dy = read(c.dy_dtype, c.dy, (row + r) * c.columns + i, count);
      if constexpr (is_gated(kKind)) {
        const auto g = gated_value_and_grads<kKind>(dy, read(x + a, count), read(x + b, count), params);
        write(dx + a, g.da, count);
        write(dx + b, g.db, count);
        sum_a = sum_a + g.da;
        sum_b = sum_b + g.db;
      } else {
        const Vec v = dy * act_value_and_grad<kKind>(read(x + a, count), params).grad;
        write(dx + a, v, count);
        sum_a = sum_a + v;
      }
    }
    add(i, sum_a, count);
    if constexpr (is_gated(kKind)) add(c.columns + i, sum_b, count);
  });
}

template <ActKind kKind, class T>
void act_backward_column_sums(const ActCall& c, int64_t begin, int64_t end) {
  const ActParams params(c.act);
  int64_t row = begin;
  for (; row + 4 <= end; row += 4) act_backward_column_sums<kKind, T, 4>(c, params, row);
  for (; row < end; ++row) act_backward_column_sums<kKind, T, 1>(c, params, row);
}

static void act_forward(const ActCall& c, int64_t begin, int64_t end) {
  with_kind(c.act.kind, [&](auto kind) {
    with_dtype(c.dtype, [&](auto t) { act_forward_rows<kind(), decltype(t)>(c, begin, end); });
  });
}

static void act_backward(const ActCall& c, int64_t begin, int64_t end) {
  const bool by_four = c.column_sums && c.blocks == 1 && !c.scales && !c.ds;
  with_kind(c.act.kind, [&](auto kind) {
    with_dtype(c.dtype, [&](auto t) {
      by_four ? act_backward_column_sums<kind(), decltype(t)>(c, begin, end)
              : act_backward_rows<kind(), decltype(t)>(c, begin, end);
    });
  });
}

const ActLoops act_loops{act_forward, act_backward};

}  // namespace weft::kernels::CPU_CAPABILITY
