#pragma once
#include <algorithm>

#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"

namespace weft::kernels::CPU_CAPABILITY {

/// Adds four rows at a time, so that each sum is loaded and stored once per four rows.
template <class T>
void add_rows_typed(const T* x, int64_t columns, float* sums, int64_t begin, int64_t end) {
  int64_t row = begin;
  for (; row + 4 <= end; row += 4) {
    const T* p = x + row * columns;
    for_each_vector(columns, [&](int64_t i, auto count) {
      const Vec upper = read(p + i, count) + read(p + columns + i, count);
      const Vec lower = read(p + 2 * columns + i, count) + read(p + 3 * columns + i, count);
      write(sums + i, read(sums + i, count) + (upper + lower), count);
    });
  }
  for (; row < end; ++row) {
    const T* p = x + row * columns;
    for_each_vector(columns,
                    [&](int64_t i, auto count) { write(sums + i, read(sums + i, count) + read(p + i, count), count); });
  }
}

static void add_rows(at::ScalarType dtype, const void* x, int64_t columns, float* sums, int64_t begin, int64_t end) {
  with_dtype(dtype, [&](auto t) { add_rows_typed(static_cast<const decltype(t)*>(x), columns, sums, begin, end); });
}

static void round(at::ScalarType dtype, const float* values, void* out, int64_t count) {
  for_each_vector(count, [&](int64_t i, auto n) { write(dtype, out, i, read(values + i, n), n); });
}

/// Reads `count` booleans as 0 and 1.
template <class Count>
Vec read_mask(const bool* mask, Count count) {
  alignas(16) int8_t bytes[16] = {};
  std::memcpy(bytes, mask, static_cast<size_t>(static_cast<int64_t>(count)));
  return from_bools(bytes);
}

template <class T>
void scaled_mask_add_typed(const MaskCall& c, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(c.x) + begin;
  T* out = static_cast<T*>(c.out) + begin;
  const Vec scale(c.scale);
  for_each_vector(end - begin, [&](int64_t i, auto count) {
    Vec v = read(x + i, count) * read_mask(c.mask + begin + i, count) * scale;
    if (c.addend) v = v + read(c.addend_dtype, c.addend, begin + i, count);
    write(out + i, v, count);
  });
}

static void scaled_mask_add(const MaskCall& c, int64_t begin, int64_t end) {
  with_dtype(c.dtype, [&](auto t) { scaled_mask_add_typed<decltype(t)>(c, begin, end); });
}

/// All terms and `out` have type T.
template <class T>
void sum_terms_typed(const SumCall& c, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const auto row_ptr = [&](const RowMajorView& r) { return static_cast<T*>(r.data) + row * r.ld; };
    for_each_vector(c.columns, [&](int64_t i, auto count) {
      Vec sum = read(row_ptr(c.terms[0]) + i, count);
      for (size_t t = 1; t < c.terms.size(); ++t) sum = sum + read(row_ptr(c.terms[t]) + i, count);
      write(row_ptr(c.out) + i, sum, count);
    });
  }
}

static void sum_terms_mixed(const SumCall& c, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for_each_vector(c.columns, [&](int64_t i, auto count) {
      Vec sum(0.F);
      for (const auto& t : c.terms) sum = sum + read(t.dtype, t.data, row * t.ld + i, count);
      write(c.out.dtype, c.out.data, row * c.out.ld + i, sum, count);
    });
}

static void sum_terms(const SumCall& c, int64_t begin, int64_t end) {
  const auto same = [&](const RowMajorView& t) { return t.dtype == c.out.dtype; };
  if (c.terms.empty() || !std::all_of(c.terms.begin(), c.terms.end(), same)) return sum_terms_mixed(c, begin, end);
  with_dtype(c.out.dtype, [&](auto t) { sum_terms_typed<decltype(t)>(c, begin, end); });
}

const RowLoops row_loops{add_rows, round, scaled_mask_add, sum_terms};

}  // namespace weft::kernels::CPU_CAPABILITY
