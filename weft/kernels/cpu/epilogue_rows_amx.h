#pragma once
#include <c10/core/ScalarType.h>

#include <array>
#include <optional>

#include "weft/kernels/cpu/act_vec.h"
#include "weft/kernels/cpu/pack_amx.h"

// The epilogue of a 32 × 32 accumulator block, one row at a time, so that it can overlap with the tile multiplications
// of the next block.

namespace weft::kernels::CPU_CAPABILITY {

/// How results are stored.
enum class Store {
  cached,
  non_temporal,  // bypasses the caches: full aligned cache lines that are not read soon
};

/// A float32, bfloat16 or float16 matrix, row-major or blocked: 32 × 32 blocks in column-major order, which is the
/// order in which a GEMM computes them.
struct MatrixView {
  char* data = nullptr;
  int64_t ld = 0;  // row stride in elements
  at::ScalarType dtype = at::kFloat;
  Store store = Store::cached;
  int64_t blocks_per_column = 0;  // blocked layout: blocks in a column of blocks; 0: row-major

  int64_t element_size() const { return dtype == at::kFloat ? 4 : 2; }
  char* at(int64_t row, int64_t column) const {
    if (blocks_per_column == 0) return data + (row * ld + column) * element_size();
    const int64_t block = column / kBlockDim * blocks_per_column + row / kBlockDim;
    return data + (block * kBlockElems + row % kBlockDim * ld + column % kBlockDim) * element_size();
  }
};

inline __mmask16 lane_mask(int64_t count) {
  return count >= 16 ? 0xffff : static_cast<__mmask16>((1U << std::max<int64_t>(count, 0)) - 1);
}

inline __m512i pack_bf16(__m512 v0, __m512 v1) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v1, v0)); }

inline __m512 load16(const MatrixView& from, int64_t row, int64_t column, __mmask16 mask) {
  const char* p = from.at(row, column);
  if (from.dtype == at::kFloat) return _mm512_maskz_loadu_ps(mask, p);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, p);
  if (from.dtype == at::kHalf) return _mm512_cvtph_ps(half);
  return widen_bf16(half);
}

inline void store16(const MatrixView& to, int64_t row, int64_t column, __m512 v, __mmask16 mask) {
  char* p = to.at(row, column);
  if (to.dtype == at::kFloat) {
    _mm512_mask_storeu_ps(p, mask, v);
  } else if (to.dtype == at::kHalf) {
    _mm256_mask_storeu_epi16(p, mask, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  } else {
    _mm256_mask_storeu_epi16(p, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
  }
}

/// Stores the first min(left, 32) of 32 adjacent elements.
inline void store32(const MatrixView& to, int64_t row, int64_t column, __m512 v0, __m512 v1, int64_t left) {
  if (left >= kBlockDim && to.dtype == at::kBFloat16) {
    const auto pairs = pack_bf16(v0, v1);
    auto* p = reinterpret_cast<__m512i*>(to.at(row, column));
    to.store == Store::non_temporal ? _mm512_stream_si512(p, pairs) : _mm512_storeu_si512(p, pairs);
    return;
  }
  store16(to, row, column, v0, lane_mask(left));
  store16(to, row, column + 16, v1, lane_mask(left - 16));
}

struct EpilogueArgs;
using RowFunction = void (*)(const EpilogueArgs&, const float* block, int64_t row, int64_t column);

constexpr int kMaxAddends = 3;

/// The `Epilogue` of a call as raw pointers, built once.
struct EpilogueArgs {
  int64_t rows = 0, columns = 0;  // of the GEMM
  int64_t half = 0;               // gated: columns of a, and of b
  int64_t full_panel_limit = 0;   // panels that end at or before this column are full
  float scale = 1;
  const float* bias = nullptr;  // padded by 32 elements
  MatrixView out, pre_act, act_input, act_output;
  std::array<MatrixView, kMaxAddends> addends;  // the first `num_addends` of them
  int num_addends = 0;
  float* column_sums = nullptr;                     // of this thread; padded by 32 elements
  Bf16* packed_transpose = nullptr;                 // outᵀ packed; only if all blocks are full
  Bf16* transpose_scratch = nullptr;                // two blocks of this thread, to be transposed
  int64_t prefetch_rows = 0, prefetch_columns = 0;  // offset from a block to the next one
  ActParams act{Act{}};
  RowFunction row = nullptr;
};

inline void prefetch_ahead(const EpilogueArgs& w, const MatrixView& view, int64_t row, int64_t column, int width) {
  if (!view.data || row + w.prefetch_rows >= w.rows) return;
  const char* p = view.at(row + w.prefetch_rows, column + w.prefetch_columns);
  for (int i = 0; i < width * view.element_size(); i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
}

inline void add_column_sums(float* sums, __m512 v0, __m512 v1) {
  _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), v0));
  _mm512_storeu_ps(sums + 16, _mm512_add_ps(_mm512_loadu_ps(sums + 16), v1));
}

inline void finish32(const EpilogueArgs& w, int64_t row, int64_t column, __m512 v0, __m512 v1, int64_t left) {
  if (w.column_sums) add_column_sums(w.column_sums + column, v0, v1);
  for (int i = 0; i < w.num_addends; ++i) {
    v0 = _mm512_add_ps(v0, load16(w.addends[i], row, column, lane_mask(left)));
    v1 = _mm512_add_ps(v1, load16(w.addends[i], row, column + 16, lane_mask(left - 16)));
    prefetch_ahead(w, w.addends[i], row, column, kBlockDim);
  }
  store32(w.out, row, column, v0, v1, left);
}

/// v = act(scale·P + bias) + addends, for 32 columns of one row.
template <int kKind>
void value_row(const EpilogueArgs& w, const float* c, int64_t row, int64_t column) {
  const __m512 scale = _mm512_set1_ps(w.scale);
  __m512 v0 = _mm512_mul_ps(_mm512_load_ps(c), scale), v1 = _mm512_mul_ps(_mm512_load_ps(c + 256), scale);
  const int64_t left = w.columns - column;
  if (w.bias) {
    v0 = _mm512_add_ps(v0, _mm512_loadu_ps(w.bias + column));
    v1 = _mm512_add_ps(v1, _mm512_loadu_ps(w.bias + column + 16));
  }
  if (w.pre_act.data) store32(w.pre_act, row, column, v0, v1, left);
  if constexpr (kKind >= 0) {
    v0 = act_value<ActKind{kKind}>(v0, w.act);
    v1 = act_value<ActKind{kKind}>(v1, w.act);
  }
  finish32(w, row, column, v0, v1, left);
}

/// Gated: the block holds columns of b; the preceding block in memory holds those of a.
template <ActKind kKind>
void gated_row(const EpilogueArgs& w, const float* c, int64_t row, int64_t column) {
  const __m512 scale = _mm512_set1_ps(w.scale);
  const int64_t left = w.half - column;
  __m512 v[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t first_column = column + 16 * i;
    const auto mask = lane_mask(left - 16 * i);
    __m512 a = _mm512_mul_ps(_mm512_load_ps(c - kBlockElems + 256 * i), scale);
    __m512 b = _mm512_mul_ps(_mm512_load_ps(c + 256 * i), scale);
    if (w.bias) {
      a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(mask, w.bias + first_column));
      b = _mm512_add_ps(b, _mm512_maskz_loadu_ps(mask, w.bias + w.half + first_column));
    }
    if (w.pre_act.data) {
      store16(w.pre_act, row, first_column, a, mask);
      store16(w.pre_act, row, w.half + first_column, b, mask);
    }
    v[i] = gated_value<kKind>(a, b, w.act);
  }
  finish32(w, row, column, v[0], v[1], left);
}

/// v = scale·P·act'(act_input).
template <ActKind kKind>
void act_grad_row(const EpilogueArgs& w, const float* c, int64_t row, int64_t column) {
  const __m512 scale = _mm512_set1_ps(w.scale);
  const int64_t left = w.columns - column;
  const __m512 x0 = load16(w.act_input, row, column, lane_mask(left)),
               x1 = load16(w.act_input, row, column + 16, lane_mask(left - 16));
  prefetch_ahead(w, w.act_input, row, column, kBlockDim);
  const auto [f0, s0] = act_value_and_grad<kKind>(x0, w.act);
  const auto [f1, s1] = act_value_and_grad<kKind>(x1, w.act);
  if (w.act_output.data) store32(w.act_output, row, column, f0, f1, left);
  finish32(w, row, column, _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(c), scale), s0),
           _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(c + 256), scale), s1), left);
}

/// Gated: da = v·f'(a)·h(b) in column j, db = v·f(a)·h'(b) in column N + j.
template <ActKind kKind>
void gated_act_grad_row(const EpilogueArgs& w, const float* c, int64_t row, int64_t column) {
  const __m512 scale = _mm512_set1_ps(w.scale);
  __m512 da[2], db[2], act_output[2];
  for (int i = 0; i < 2; ++i) {
    const auto mask = lane_mask(w.columns - column - 16 * i);
    const __m512 a = load16(w.act_input, row, column + 16 * i, mask);
    const __m512 b = load16(w.act_input, row, w.columns + column + 16 * i, mask);
    const __m512 dy = _mm512_mul_ps(_mm512_load_ps(c + 256 * i), scale);
    const auto g = gated_value_and_grads<kKind>(dy, a, b, w.act);
    act_output[i] = g.value;
    da[i] = g.da;
    db[i] = g.db;
  }
  prefetch_ahead(w, w.act_input, row, column, kBlockDim);
  prefetch_ahead(w, w.act_input, row, w.columns + column, kBlockDim);
  const int64_t left = w.columns - column;
  if (w.act_output.data) store32(w.act_output, row, column, act_output[0], act_output[1], left);
  finish32(w, row, column, da[0], da[1], left);
  finish32(w, row, w.columns + column, db[0], db[1], left);
}

/// The row function of an epilogue.
inline RowFunction row_function(const std::optional<Act>& act, const std::optional<Act>& act_grad) {
  RowFunction row = value_row<-1>;
  if (const auto& any = act ? act : act_grad)
    with_kind(any->kind, [&](auto kind) {
      if constexpr (is_gated(kind))
        row = act ? gated_row<kind> : gated_act_grad_row<kind>;
      else
        row = act ? value_row<static_cast<int>(ActKind{kind})> : act_grad_row<kind>;
    });
  return row;
}

}  // namespace weft::kernels::CPU_CAPABILITY
