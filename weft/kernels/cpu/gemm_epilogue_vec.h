#pragma once
#include <array>

#include "weft/kernels/cpu/act_vec.h"
#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"

namespace weft::kernels::CPU_CAPABILITY {

/// One row of a block: what is read before the activation and written after it.
struct EpilogueRow {
  const RowBlock& block;
  int64_t row;
  Vec scale{block.scale};

  template <class Count>
  Vec get(const Rows& rows, int64_t j, Count count) const {
    return read(rows.dtype, rows.data, row * rows.ld + j, count);
  }
  template <class Count>
  void put(const Rows& rows, int64_t j, const Vec& v, Count count) const {
    write(rows.dtype, rows.data, row * rows.ld + j, v, count);
  }
  /// scale·P + bias, kept as `pre`.
  template <class Count>
  Vec product(int64_t j, Count count) const {
    Vec v = scale * get(block.product, j, count);
    if (block.bias) v = v + read(block.bias.dtype, block.bias.data, j, count);
    if (block.pre) put(block.pre, j, v, count);
    return v;
  }
  /// Sums, residual, store.
  template <class Count>
  void finish(int64_t j, Vec v, Count count) const {
    if (block.sums) write(block.sums + j, read(block.sums + j, count) + v, count);
    if (block.add) v = v + get(block.add, j, count);
    if (block.out) put(block.out, j, v, count);
  }
};

/// run(a, b, y, count): the columns of a, b and y = f(a)·h(b) that belong together; `columns` of y.
template <class F>
void each_gated(const Act& act, int64_t columns, const F& run) {
  const auto size = act.interleave > 0 ? act.interleave : columns;
  for (int64_t start = 0; start < columns; start += size)
    each_vector(size, [&](int64_t i, auto count) { run(2 * start + i, 2 * start + size + i, start + i, count); });
}

template <ActKind kKind>
void act_row(const EpilogueRow& r, const ActParams& params) {
  if constexpr (is_gated(kKind)) {
    each_gated(*r.block.act, r.block.columns / 2, [&](int64_t a, int64_t b, int64_t y, auto count) {
      r.finish(y, gated_value<kKind>(r.product(a, count), r.product(b, count), params), count);
    });
  } else {
    each_vector(r.block.columns,
                [&](int64_t i, auto count) { r.finish(i, act_value<kKind>(r.product(i, count), params), count); });
  }
}

template <ActKind kKind>
void slope_row(const EpilogueRow& r, const ActParams& params) {
  const auto& block = r.block;
  if constexpr (is_gated(kKind)) {
    each_gated(*block.slope, block.columns, [&](int64_t a, int64_t b, int64_t y, auto count) {
      const auto g =
          gated_both<kKind>(r.product(y, count), r.get(block.at, a, count), r.get(block.at, b, count), params);
      if (block.again) r.put(block.again, y, g.value, count);
      r.finish(a, g.da, count);
      r.finish(b, g.db, count);
    });
  } else {
    each_vector(block.columns, [&](int64_t i, auto count) {
      const auto f = act_both<kKind>(r.get(block.at, i, count), params);
      if (block.again) r.put(block.again, i, f.value, count);
      r.finish(i, r.product(i, count) * f.slope, count);
    });
  }
}

static void apply_epilogue(const RowBlock& block, int64_t begin, int64_t end) {
  if (!block.act && !block.slope) {
    for (auto row = begin; row < end; ++row) {
      const EpilogueRow r{block, row};
      each_vector(block.columns, [&](int64_t i, auto count) { r.finish(i, r.product(i, count), count); });
    }
    return;
  }
  const Act& act = block.act ? *block.act : *block.slope;
  const ActParams params(act);
  with_kind(act.kind, [&](auto kind) {
    for (auto row = begin; row < end; ++row) {
      const EpilogueRow r{block, row};
      block.act ? act_row<kind()>(r, params) : slope_row<kind()>(r, params);
    }
  });
}

/// b[j][k] for 16 j and 16 k as to[k][j], with rows `ld` apart.
template <class T>
void transpose_block(const T* from, int64_t stride, float* to, int64_t ld) {
  constexpr int kSize = kWidth;
  alignas(64) float rows[kSize * kSize];
  if constexpr (std::is_same_v<T, float>) return at::vec::transpose_mxn<float, kSize, kSize>(from, stride, to, ld);
  for (int64_t j = 0; j < kSize; ++j) write(rows + j * kSize, read(from + j * stride));
  at::vec::transpose_mxn<float, kSize, kSize>(rows, kSize, to, ld);
}

/// B as float32 with rows one after the other: B itself, or a copy in `scratch`.
template <class T>
Rows small_factor(const Strided& b, float* scratch) {
  const T* data = static_cast<const T*>(b.data);
  if (std::is_same_v<T, float> && b.column_stride == 1)
    return {const_cast<void*>(b.data), b.row_stride, at::kFloat};  // only read
  const Rows out{scratch, b.columns, at::kFloat};
  if (b.column_stride == 1) {
    for (int64_t k = 0; k < b.rows; ++k)
      each_vector(b.columns, [&](int64_t j, auto count) {
        write(scratch + k * b.columns + j, read(data + k * b.row_stride + j, count), count);
      });
    return out;
  }
  const bool blocks = b.row_stride == 1;
  const int64_t whole_rows = blocks ? b.rows / kWidth * kWidth : 0, whole_columns = b.columns / kWidth * kWidth;
  for (int64_t k = 0; k < whole_rows; k += kWidth)
    for (int64_t j = 0; j < whole_columns; j += kWidth)
      transpose_block(data + j * b.column_stride + k, b.column_stride, scratch + k * b.columns + j, b.columns);
  for (int64_t k = 0; k < b.rows; ++k) {
    int64_t j = k < whole_rows ? whole_columns : 0;
    const T* from = data + k * b.row_stride + j * b.column_stride;
    for (; j < b.columns; ++j, from += b.column_stride) scratch[k * b.columns + j] = static_cast<float>(*from);
  }
  return out;
}

/// kRows rows of p from row i on, as sums of the rows of B.
template <int kRows, class T>
void small_rows(const Strided& a, const Rows& b, int64_t n, const Rows& p, int64_t i) {
  each_vector(n, [&](int64_t j, auto count) {
    const T* value = static_cast<const T*>(a.data) + i * a.row_stride;
    const float* row = static_cast<const float*>(b.data) + j;
    std::array<Vec, kRows> sums;
    sums.fill(Vec(0.F));
    for (int64_t k = 0; k < a.columns; ++k, value += a.column_stride, row += b.ld) {
      const Vec factor = read(row, count);
      for (int r = 0; r < kRows; ++r) sums[r] = fma(Vec(static_cast<float>(value[r * a.row_stride])), factor, sums[r]);
    }
    for (int r = 0; r < kRows; ++r) write(static_cast<float*>(p.data) + (i + r) * p.ld + j, sums[r], count);
  });
}

static void small_product(at::ScalarType dtype, const Strided& a, const Strided& b, float* scratch, const Rows& p) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    const auto factor = small_factor<T>(b, scratch);
    int64_t i = 0;
    for (; i + 4 <= a.rows; i += 4) small_rows<4, T>(a, factor, b.columns, p, i);
    for (; i < a.rows; ++i) small_rows<1, T>(a, factor, b.columns, p, i);
  });
}

const EpilogueLoops epilogue_loops{apply_epilogue, small_product};

}  // namespace weft::kernels::CPU_CAPABILITY
