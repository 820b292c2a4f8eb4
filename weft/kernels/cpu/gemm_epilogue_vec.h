#pragma once
#include "weft/kernels/cpu/act_vec.h"
#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu/small_vec.h"

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

static void small_product(at::ScalarType dtype, const Strided& a, const Strided& b, float* scratch, const Rows& p) {
  with_dtype(dtype, [&](auto t) {
    each_small<decltype(t)>(a, b, scratch, [&](int64_t i, int64_t j, const Vec& sum, auto count) {
      write(static_cast<float*>(p.data) + i * p.ld + j, sum, count);
    });
  });
}

const EpilogueLoops epilogue_loops{apply_epilogue, small_product};

}  // namespace weft::kernels::CPU_CAPABILITY
