#pragma once
#include <array>

#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"

// GEMMs of small matrices, see gemm_is_small.

namespace weft::kernels::CPU_CAPABILITY {

/// to[k][j] = from[j][k] for a kVecSize × kVecSize block with row strides `ld` (to) and `stride` (from).
template <class T>
void transpose_block(const T* from, int64_t stride, float* to, int64_t ld) {
  constexpr int kSize = kVecSize;
  alignas(64) float rows[kSize * kSize];
  if constexpr (std::is_same_v<T, float>) return at::vec::transpose_mxn<float, kSize, kSize>(from, stride, to, ld);
  for (int64_t j = 0; j < kSize; ++j) write(rows + j * kSize, read(from + j * stride));
  at::vec::transpose_mxn<float, kSize, kSize>(rows, kSize, to, ld);
}

/// B as a row-major float32 matrix: B itself, or a copy in `scratch`.
template <class T>
RowMajorView small_factor(const StridedMatrix& b, float* scratch) {
  const T* data = static_cast<const T*>(b.data);
  if (std::is_same_v<T, float> && b.column_stride == 1)
    return {const_cast<void*>(b.data), b.row_stride, at::kFloat};  // only read
  const RowMajorView out{scratch, b.columns, at::kFloat};
  if (b.column_stride == 1) {
    for (int64_t k = 0; k < b.rows; ++k)
      for_each_vector(b.columns, [&](int64_t j, auto count) {
        write(scratch + k * b.columns + j, read(data + k * b.row_stride + j, count), count);
      });
    return out;
  }
  const bool column_major = b.row_stride == 1;
  const int64_t full_rows = column_major ? b.rows / kVecSize * kVecSize : 0,
                full_columns = b.columns / kVecSize * kVecSize;
  for (int64_t k = 0; k < full_rows; k += kVecSize)
    for (int64_t j = 0; j < full_columns; j += kVecSize)
      transpose_block(data + j * b.column_stride + k, b.column_stride, scratch + k * b.columns + j, b.columns);
  for (int64_t k = 0; k < b.rows; ++k) {
    int64_t j = k < full_rows ? full_columns : 0;
    const T* from = data + k * b.row_stride + j * b.column_stride;
    for (; j < b.columns; ++j, from += b.column_stride) scratch[k * b.columns + j] = static_cast<float>(*from);
  }
  return out;
}

/// Calls put(row, column, values, count) for kRows rows of A B from row i on.
template <int kRows, class T, class Put>
void small_rows(const StridedMatrix& a, const RowMajorView& b, int64_t n, int64_t i, const Put& put) {
  for_each_vector(n, [&](int64_t j, auto count) {
    const T* value = static_cast<const T*>(a.data) + i * a.row_stride;
    const float* row = static_cast<const float*>(b.data) + j;
    std::array<Vec, kRows> sums;
    sums.fill(Vec(0.F));
    for (int64_t k = 0; k < a.columns; ++k, value += a.column_stride, row += b.ld) {
      const Vec factor = read(row, count);
      for (int r = 0; r < kRows; ++r) sums[r] = fma(Vec(static_cast<float>(value[r * a.row_stride])), factor, sums[r]);
    }
    for (int r = 0; r < kRows; ++r) put(i + r, j, sums[r], count);
  });
}

/// Calls put(row, column, values, count) for all of A B. `scratch` has the size of B.
template <class T, class Put>
void for_each_small_row(const StridedMatrix& a, const StridedMatrix& b, float* scratch, const Put& put) {
  const auto factor = small_factor<T>(b, scratch);
  int64_t i = 0;
  for (; i + 4 <= a.rows; i += 4) small_rows<4, T>(a, factor, b.columns, i, put);
  for (; i < a.rows; ++i) small_rows<1, T>(a, factor, b.columns, i, put);
}

}  // namespace weft::kernels::CPU_CAPABILITY
