#pragma once
#include "weft/kernels/cpu/act_vec.h"
#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu/small_vec.h"

namespace weft::kernels::CPU_CAPABILITY {

/// One row of the epilogue: the reads before the activation and the writes after it.
struct EpilogueRow {
  const EpilogueCall& call;
  int64_t row;
  Vec scale{call.scale};

  template <class Count>
  Vec get(const RowMajorView& rows, int64_t j, Count count) const {
    return read(rows.dtype, rows.data, row * rows.ld + j, count);
  }
  template <class Count>
  void put(const RowMajorView& rows, int64_t j, const Vec& v, Count count) const {
    write(rows.dtype, rows.data, row * rows.ld + j, v, count);
  }
  /// scale·P + bias, rounded to `step_dtype`; stored to `pre_act` if that is kept.
  template <class Count>
  Vec pre_activation(int64_t j, Count count) const {
    Vec v = scale * get(call.product, j, count);
    if (call.bias) v = v + read(call.bias.dtype, call.bias.data, j, count);
    v = rounded(call.step_dtype, v);
    if (call.pre_act) put(call.pre_act, j, v, count);
    return v;
  }
  /// Adds to the column sums, adds the addend, stores.
  template <class Count>
  void finish(int64_t j, Vec v, Count count) const {
    if (call.column_sums) write(call.column_sums + j, read(call.column_sums + j, count) + v, count);
    if (call.addend) v = v + get(call.addend, j, count);
    if (call.out) put(call.out, j, v, count);
  }
};

/// Calls run(a, b, y, count) with the matching columns of a, b and y = f(a)·h(b); y has `columns` columns.
template <class F>
void for_each_gated(const Act& act, int64_t columns, const F& run) {
  const auto size = act.interleave > 0 ? act.interleave : columns;
  for (int64_t start = 0; start < columns; start += size)
    for_each_vector(size, [&](int64_t i, auto count) { run(2 * start + i, 2 * start + size + i, start + i, count); });
}

template <ActKind kKind>
void act_row(const EpilogueRow& r, const ActParams& params) {
  if constexpr (is_gated(kKind)) {
    for_each_gated(*r.call.act, r.call.columns / 2, [&](int64_t a, int64_t b, int64_t y, auto count) {
      r.finish(y, gated_value<kKind>(r.pre_activation(a, count), r.pre_activation(b, count), params), count);
    });
  } else {
    for_each_vector(r.call.columns, [&](int64_t i, auto count) {
      r.finish(i, act_value<kKind>(r.pre_activation(i, count), params), count);
    });
  }
}

template <ActKind kKind>
void act_grad_row(const EpilogueRow& r, const ActParams& params) {
  const auto& call = r.call;
  if constexpr (is_gated(kKind)) {
    for_each_gated(*call.act_grad, call.columns, [&](int64_t a, int64_t b, int64_t y, auto count) {
      const auto g = gated_value_and_grads<kKind>(r.pre_activation(y, count), r.get(call.act_input, a, count),
                                                  r.get(call.act_input, b, count), params);
      if (call.act_output) r.put(call.act_output, y, g.value, count);
      r.finish(a, g.da, count);
      r.finish(b, g.db, count);
    });
  } else {
    for_each_vector(call.columns, [&](int64_t i, auto count) {
      const auto f = act_value_and_grad<kKind>(r.get(call.act_input, i, count), params);
      if (call.act_output) r.put(call.act_output, i, f.value, count);
      r.finish(i, r.pre_activation(i, count) * f.grad, count);
    });
  }
}

static void apply_epilogue(const EpilogueCall& call, int64_t begin, int64_t end) {
  if (!call.act && !call.act_grad) {
    for (auto row = begin; row < end; ++row) {
      const EpilogueRow r{call, row};
      for_each_vector(call.columns, [&](int64_t i, auto count) { r.finish(i, r.pre_activation(i, count), count); });
    }
    return;
  }
  const Act& act = call.act ? *call.act : *call.act_grad;
  const ActParams params(act);
  with_kind(act.kind, [&](auto kind) {
    for (auto row = begin; row < end; ++row) {
      const EpilogueRow r{call, row};
      call.act ? act_row<kind()>(r, params) : act_grad_row<kind()>(r, params);
    }
  });
}

static void small_gemm(at::ScalarType dtype, const StridedMatrix& a, const StridedMatrix& b, float* scratch,
                       const RowMajorView& p) {
  with_dtype(dtype, [&](auto t) {
    for_each_small_row<decltype(t)>(a, b, scratch, [&](int64_t i, int64_t j, const Vec& sum, auto count) {
      write(static_cast<float*>(p.data) + i * p.ld + j, sum, count);
    });
  });
}

const EpilogueLoops epilogue_loops{apply_epilogue, small_gemm};

}  // namespace weft::kernels::CPU_CAPABILITY
