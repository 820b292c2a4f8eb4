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
inline __m512 widen_bf16(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

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

// ---- Unmasked fast path -------------------------------------------------------------------------------------------
// For full rows where every matrix is bfloat16, or the result is a float32 weight gradient: no masks and no branches on
// dtype. These rows run inside the loop over tile multiplications, so their state must stay in registers: spilling it
// at each k-step costs more than the row itself.

inline __m512 load_bf16(const char* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

/// A pointer into a matrix that advances by one row.
struct RowCursor {
  char* p;
  int64_t step;

  RowCursor(const MatrixView& view, int64_t row, int64_t column)
      : p(view.data ? view.at(row, column) : nullptr), step(view.ld * view.element_size()) {}
};

template <Store kStore>
[[gnu::always_inline]] inline void store_line(char* p, __m512i v) {
  if constexpr (kStore == Store::non_temporal)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v);
  else
    _mm512_storeu_si512(p, v);
}

/// v = act(scale·P + bias) + addends. `pre_act` has the layout of `out`; addends are blocked or share one row stride.
template <int kKind, bool kKeepPreAct, int kNumAddends, Store kStore, bool kBlockedAddends = false>
class ValueRows {
 public:
  ValueRows(const EpilogueArgs& w, int64_t row, int64_t column)
      : out_(w.out.at(row, column)), step_(w.out.ld * 2), act_(&w.act) {
    if constexpr (kKeepPreAct) pre_act_ = w.pre_act.at(row, column);
    for (int i = 0; i < kNumAddends; ++i) addends_[i] = w.addends[i].at(row, column);
    if constexpr (kNumAddends > 0 && !kBlockedAddends) {
      addend_step_ = w.addends[0].ld * 2;
      prefetch_offset_ = (w.prefetch_rows * w.addends[0].ld + w.prefetch_columns) * 2;
    }
    scale_ = _mm512_set1_ps(w.scale);
    bias0_ = w.bias ? _mm512_loadu_ps(w.bias + column) : _mm512_setzero_ps();
    bias1_ = w.bias ? _mm512_loadu_ps(w.bias + column + 16) : _mm512_setzero_ps();
  }
  [[gnu::always_inline]] void row(const float* c) {
    __m512 v0 = _mm512_fmadd_ps(_mm512_load_ps(c), scale_, bias0_);
    __m512 v1 = _mm512_fmadd_ps(_mm512_load_ps(c + 256), scale_, bias1_);
    if constexpr (kKeepPreAct) store_line<kStore>(pre_act_ + offset_, pack_bf16(v0, v1));
    if constexpr (kKind >= 0) {
      v0 = act_value<ActKind{kKind}, ActPrecision::bfloat16>(v0, *act_);
      v1 = act_value<ActKind{kKind}, ActPrecision::bfloat16>(v1, *act_);
    }
#pragma GCC unroll 3
    for (int i = 0; i < kNumAddends; ++i) {
      v0 = _mm512_add_ps(v0, load_bf16(addends_[i]));
      v1 = _mm512_add_ps(v1, load_bf16(addends_[i] + 32));
      _mm_prefetch(addends_[i] + (kBlockedAddends ? kBlockElems * 2 : prefetch_offset_), _MM_HINT_T0);
      addends_[i] += kBlockedAddends ? kBlockDim * 2 : addend_step_;
    }
    store_line<kStore>(out_ + offset_, pack_bf16(v0, v1));
    offset_ += step_;
  }
  void end(const EpilogueArgs&, int64_t, int64_t) {}

 private:
  char *out_, *pre_act_ = nullptr;
  std::array<char*, kNumAddends> addends_;
  int64_t offset_ = 0, step_, addend_step_ = 0, prefetch_offset_ = 0;
  __m512 scale_, bias0_, bias1_;
  const ActParams* act_;
};

/// Gated: the block holds columns of b; the preceding block in memory holds those of a.
template <ActKind kKind, Store kStore>
class GatedRows {
 public:
  GatedRows(const EpilogueArgs& w, int64_t row, int64_t column)
      : out_(w.out, row, column), a_(w.pre_act, row, column), b_offset_(w.half * 2), act_(&w.act) {
    for (int i = 0; i < 2; ++i) {
      bias_a_[i] = w.bias ? _mm512_loadu_ps(w.bias + column + 16 * i) : _mm512_setzero_ps();
      bias_b_[i] = w.bias ? _mm512_loadu_ps(w.bias + w.half + column + 16 * i) : _mm512_setzero_ps();
    }
  }
  [[gnu::always_inline]] void row(const float* c) {
    const float* next = c + kBlockElems;  // of a
    _mm_prefetch(next, _MM_HINT_T0);
    _mm_prefetch(next + 256, _MM_HINT_T0);
    const __m512 a0 = _mm512_add_ps(_mm512_load_ps(c - kBlockElems), bias_a_[0]);
    const __m512 a1 = _mm512_add_ps(_mm512_load_ps(c - kBlockElems + 256), bias_a_[1]);
    const __m512 b0 = _mm512_add_ps(_mm512_load_ps(c), bias_b_[0]);
    const __m512 b1 = _mm512_add_ps(_mm512_load_ps(c + 256), bias_b_[1]);
    if (a_.p) {
      store_line<kStore>(a_.p, pack_bf16(a0, a1));
      store_line<kStore>(a_.p + b_offset_, pack_bf16(b0, b1));
      a_.p += a_.step;
    }
    store_line<kStore>(out_.p, pack_bf16(gated_value<kKind, ActPrecision::bfloat16>(a0, b0, *act_),
                                         gated_value<kKind, ActPrecision::bfloat16>(a1, b1, *act_)));
    out_.p += out_.step;
  }
  void end(const EpilogueArgs&, int64_t, int64_t) {}

 private:
  RowCursor out_, a_;
  int64_t b_offset_;
  __m512 bias_a_[2], bias_b_[2];
  const ActParams* act_;
};

/// Packs the transpose of a block of the result, given as contiguous `rows`, into its two tiles.
inline void store_transposed_tiles(const EpilogueArgs& w, const Bf16* rows, int64_t row, int64_t column) {
  const int64_t block = column / kBlockDim * (w.rows / kBlockDim) + row / kBlockDim;
  pack_pair<true, true>(rows, kBlockDim, w.packed_transpose + block * 2 * kTileElems);
}

/// v = P·act'(act_input), with act(act_input) and column sums. All matrices share one row stride.
template <ActKind kKind, bool kKeepActOutput, Store kStore>
class ActGradRows {
 public:
  ActGradRows(const EpilogueArgs& w, int64_t row, int64_t column)
      : out_(w.out.at(row, column)),
        x_(w.act_input.at(row, column)),
        transpose_scratch_(w.transpose_scratch),
        step_(w.out.ld * 2),
        act_(&w.act) {
    if constexpr (kKeepActOutput) act_output_ = w.act_output.at(row, column);
    prefetch_offset_ = (w.prefetch_rows * w.act_input.ld + w.prefetch_columns) * 2;
  }
  [[gnu::always_inline]] void row(const float* c) {
    const auto [f0, s0] = act_value_and_grad<kKind, ActPrecision::bfloat16>(load_bf16(x_ + offset_), *act_);
    const auto [f1, s1] = act_value_and_grad<kKind, ActPrecision::bfloat16>(load_bf16(x_ + offset_ + 32), *act_);
    _mm_prefetch(x_ + offset_ + prefetch_offset_, _MM_HINT_T0);
    if constexpr (kKeepActOutput) store_line<kStore>(act_output_ + offset_, pack_bf16(f0, f1));
    const __m512 v0 = _mm512_mul_ps(_mm512_load_ps(c), s0), v1 = _mm512_mul_ps(_mm512_load_ps(c + 256), s1);
    sum0_ = _mm512_add_ps(sum0_, v0);
    sum1_ = _mm512_add_ps(sum1_, v1);
    const __m512i v = pack_bf16(v0, v1);
    store_line<kStore>(out_ + offset_, v);
    if (transpose_scratch_) {
      _mm512_store_si512(transpose_scratch_, v);
      transpose_scratch_ += kBlockDim;
    }
    offset_ += step_;
  }
  void end(const EpilogueArgs& w, int64_t row, int64_t column) {
    if (w.column_sums) add_column_sums(w.column_sums + column, sum0_, sum1_);
    if (w.transpose_scratch) store_transposed_tiles(w, w.transpose_scratch, row, column);
  }

 private:
  char *out_, *x_, *act_output_ = nullptr;
  Bf16* transpose_scratch_;
  int64_t offset_ = 0, step_, prefetch_offset_;
  __m512 sum0_ = _mm512_setzero_ps(), sum1_ = _mm512_setzero_ps();
  const ActParams* act_;
};

/// Gated: `act_input` and the result have a in column j and b in column N + j.
template <ActKind kKind, Store kStore>
class GatedActGradRows {
 public:
  GatedActGradRows(const EpilogueArgs& w, int64_t row, int64_t column)
      : da_(w.out, row, column),
        act_input_(w.act_input, row, column),
        act_output_(w.act_output, row, column),
        transpose_scratch_(w.transpose_scratch),
        out_b_offset_(w.columns * w.out.element_size()),
        input_b_offset_(w.columns * w.act_input.element_size()),
        act_(&w.act) {
    prefetch_offset_ = (w.prefetch_rows * w.act_input.ld + w.prefetch_columns) * w.act_input.element_size();
  }
  [[gnu::always_inline]] void row(const float* c) {
    const auto g0 = gated_value_and_grads<kKind, ActPrecision::bfloat16>(
        _mm512_load_ps(c), load_bf16(act_input_.p), load_bf16(act_input_.p + input_b_offset_), *act_);
    const auto g1 = gated_value_and_grads<kKind, ActPrecision::bfloat16>(
        _mm512_load_ps(c + 256), load_bf16(act_input_.p + 32), load_bf16(act_input_.p + input_b_offset_ + 32), *act_);
    _mm_prefetch(act_input_.p + prefetch_offset_, _MM_HINT_T0);
    _mm_prefetch(act_input_.p + prefetch_offset_ + input_b_offset_, _MM_HINT_T0);
    act_input_.p += act_input_.step;
    if (act_output_.p) {
      store_line<kStore>(act_output_.p, pack_bf16(g0.value, g1.value));
      act_output_.p += act_output_.step;
    }
    for (int i = 0; i < 4; ++i)
      sums_[i] = _mm512_add_ps(sums_[i], i == 0 ? g0.da : i == 1 ? g1.da : i == 2 ? g0.db : g1.db);
    const __m512i da = pack_bf16(g0.da, g1.da), db = pack_bf16(g0.db, g1.db);
    store_line<kStore>(da_.p + out_b_offset_, db);
    store_line<kStore>(da_.p, da);
    da_.p += da_.step;
    if (transpose_scratch_) {
      _mm512_store_si512(transpose_scratch_, da);
      _mm512_store_si512(transpose_scratch_ + kBlockElems, db);
      transpose_scratch_ += kBlockDim;
    }
  }
  void end(const EpilogueArgs& w, int64_t row, int64_t column) {
    if (w.column_sums) {
      add_column_sums(w.column_sums + column, sums_[0], sums_[1]);
      add_column_sums(w.column_sums + w.columns + column, sums_[2], sums_[3]);
    }
    if (!w.transpose_scratch) return;
    store_transposed_tiles(w, w.transpose_scratch, row, column);
    store_transposed_tiles(w, w.transpose_scratch + kBlockElems, row, w.columns + column);
  }

 private:
  RowCursor da_, act_input_, act_output_;
  Bf16* transpose_scratch_;
  int64_t out_b_offset_, input_b_offset_, prefetch_offset_;
  __m512 sums_[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  const ActParams* act_;
};

/// Weight gradient: out = scale·P, or out += scale·P, in float32.
template <bool kAccumulate>
class WgradRows {
 public:
  WgradRows(const EpilogueArgs& w, int64_t row, int64_t column)
      : out_(w.out, row, column), scale_(_mm512_set1_ps(w.scale)) {
    prefetch_offset_ = (w.prefetch_rows * w.out.ld + w.prefetch_columns) * 4;
  }
  [[gnu::always_inline]] void row(const float* c) {
    const __m512 v0 = _mm512_load_ps(c), v1 = _mm512_load_ps(c + 256);
    if constexpr (kAccumulate) {
      _mm512_storeu_ps(out_.p, _mm512_fmadd_ps(v0, scale_, _mm512_loadu_ps(out_.p)));
      _mm512_storeu_ps(out_.p + 64, _mm512_fmadd_ps(v1, scale_, _mm512_loadu_ps(out_.p + 64)));
      _mm_prefetch(out_.p + prefetch_offset_, _MM_HINT_T0);
      _mm_prefetch(out_.p + prefetch_offset_ + 64, _MM_HINT_T0);
    } else {
      _mm512_storeu_ps(out_.p, _mm512_mul_ps(v0, scale_));
      _mm512_storeu_ps(out_.p + 64, _mm512_mul_ps(v1, scale_));
      _mm_prefetch(out_.p + prefetch_offset_, _MM_HINT_T0);
      _mm_prefetch(out_.p + prefetch_offset_ + 64, _MM_HINT_T0);
    }
    out_.p += out_.step;
  }
  void end(const EpilogueArgs&, int64_t, int64_t) {}

 private:
  RowCursor out_;
  int64_t prefetch_offset_;
  __m512 scale_;
};

/// Any epilogue. Nothing runs inside the loop; `DeferredEpilogue::start` finishes each block at once.
class GenericRows {
 public:
  GenericRows(const EpilogueArgs&, int64_t, int64_t) {}
  void row(const float*) {}
  void end(const EpilogueArgs&, int64_t, int64_t) {}
};

/// The epilogue of a block. It is deferred into the loop of the next block if the block is full and has a fast path.
template <class RowKernel>
class DeferredEpilogue {
 public:
  static constexpr bool kHasFastPath = !std::is_same_v<RowKernel, GenericRows>;

  DeferredEpilogue(const EpilogueArgs& w, const float* block, int64_t row, int64_t column)
      : kernel_(w, row, column), c_(block), row_(row), column_(column) {}

  /// Finishes one row, if any is left.
  [[gnu::always_inline]] void step() {
    if (rows_left_ == 0) return;
    kernel_.row(c_);
    c_ += 16;
    if (--rows_left_ == 16) c_ += 256;
  }
  void finish(const EpilogueArgs& w) {
    while (rows_left_ > 0) step();
    if (full_block_) kernel_.end(w, row_, column_);
  }
  /// Defers a full block with a fast path; finishes any other block at once.
  void start(const EpilogueArgs& w) {
    const int64_t rows = std::min<int64_t>(kBlockDim, w.rows - row_);
    const bool unmasked = kHasFastPath && column_ + kBlockDim <= w.full_panel_limit;
    full_block_ = unmasked && rows == kBlockDim;
    if (full_block_) {
      rows_left_ = kBlockDim;
      return;
    }
    if (unmasked) {
      for (int64_t i = 0; i < rows; ++i) kernel_.row(c_ + (i >> 4) * 512 + (i & 15) * 16);
      return kernel_.end(w, row_, column_);
    }
    for (int64_t i = 0; i < rows; ++i) w.row(w, c_ + (i >> 4) * 512 + (i & 15) * 16, row_ + i, column_);
  }

 private:
  RowKernel kernel_;
  const float* c_;
  int64_t row_, column_;
  int rows_left_ = 0;
  bool full_block_ = false;
};

/// Selects the row kernel of an epilogue. Row chunks of the same variant can share a block.
struct KernelVariant {
  enum Kind { generic, wgrad, value, activation } kind = generic;
  int num_addends = 0;
  bool blocked_addends = false;
  Store store = Store::cached;
  bool operator==(const KernelVariant&) const = default;
};

inline KernelVariant select_variant(const EpilogueArgs& w, const std::optional<Act>& act,
                                    const std::optional<Act>& act_grad) {
  const bool plain = !act && !act_grad && !w.pre_act.data && !w.column_sums;
  if (plain && w.out.dtype == at::kFloat && !w.bias &&
      (w.num_addends == 0 || (w.num_addends == 1 && w.addends[0].data == w.out.data)))
    return {.kind = KernelVariant::wgrad, .num_addends = w.num_addends};
  const bool gated = (act && act->gated()) || (act_grad && act_grad->gated());
  bool unmasked = w.scale == 1 || !(gated || act_grad);
  const auto check_view = [&](const MatrixView& p) {
    if (p.data) unmasked = unmasked && p.dtype == at::kBFloat16 && (gated || p.ld == w.out.ld);
  };
  for (const auto* p : {&w.out, &w.pre_act, &w.act_output, &w.act_input}) check_view(*p);
  const bool blocked_addends = w.num_addends > 0 && w.addends[0].blocks_per_column > 0;
  for (int i = 0; i < w.num_addends; ++i)
    unmasked = unmasked && w.addends[i].dtype == at::kBFloat16 && w.addends[i].ld == w.addends[0].ld &&
               (w.addends[i].blocks_per_column > 0) == blocked_addends;
  if (!unmasked) return {};
  if (plain)
    return {.kind = KernelVariant::value,
            .num_addends = w.num_addends,
            .blocked_addends = blocked_addends,
            .store = w.out.store};
  if ((!act && !act_grad) || w.num_addends > 0 || (act_grad && w.bias) || (act && w.column_sums)) return {};
  // One store kind serves all outputs of a row, so non-temporal stores need every output to allow them.
  const auto non_temporal = [](const MatrixView& p) { return !p.data || p.store == Store::non_temporal; };
  const bool all = non_temporal(w.out) && non_temporal(w.pre_act) && non_temporal(w.act_output);
  return {.kind = KernelVariant::activation, .store = all ? Store::non_temporal : Store::cached};
}

/// Activations with an unmasked fast path; the others use GenericRows.
constexpr bool has_fast_path(ActKind kind) {
  return kind == ActKind::gelu || kind == ActKind::silu || kind == ActKind::relu || kind == ActKind::srelu ||
         kind == ActKind::swiglu || kind == ActKind::geglu;
}

/// Calls run<RowKernel>() with the row kernel of an activation, or of its gradient if `act_grad`.
template <class Fn>
void with_activation(const KernelVariant& variant, const EpilogueArgs& w, const std::optional<Act>& act, bool act_grad,
                     Fn&& run) {
  const auto value = [&]<ActKind kKind, Store kStore>() {
    constexpr int k = static_cast<int>(kKind);
    if (act_grad)
      return w.act_output.data ? run.template operator()<ActGradRows<kKind, true, kStore>>()
                               : run.template operator()<ActGradRows<kKind, false, kStore>>();
    w.pre_act.data ? run.template operator()<ValueRows<k, true, 0, kStore>>()
                   : run.template operator()<ValueRows<k, false, 0, kStore>>();
  };
  const auto gated = [&]<ActKind kKind, Store kStore>() {
    act_grad ? run.template operator()<GatedActGradRows<kKind, kStore>>()
             : run.template operator()<GatedRows<kKind, kStore>>();
  };
  const auto any = [&]<ActKind kKind, Store kStore>() {
    if constexpr (is_gated(kKind))
      gated.template operator()<kKind, kStore>();
    else
      value.template operator()<kKind, kStore>();
  };
  if (!has_fast_path(act->kind)) return run.template operator()<GenericRows>();
  with_kind(act->kind, [&](auto kind) {
    if constexpr (has_fast_path(kind))
      variant.store == Store::non_temporal ? any.template operator()<kind, Store::non_temporal>()
                                           : any.template operator()<kind, Store::cached>();
  });
}

/// Calls run<RowKernel>() with the row kernel of a variant. `kFewVariants` falls back to GenericRows for activations
/// and for more than one addend, to instantiate less code.
template <bool kFewVariants, class Fn>
void with_row_kernel(const KernelVariant& variant, const EpilogueArgs& w, const std::optional<Act>& act,
                     const std::optional<Act>& act_grad, Fn&& run) {
  const auto with_layout = [&]<int kNumAddends, bool kBlockedAddends>() {
    variant.store == Store::non_temporal
        ? run.template operator()<ValueRows<-1, false, kNumAddends, Store::non_temporal, kBlockedAddends>>()
        : run.template operator()<ValueRows<-1, false, kNumAddends, Store::cached, kBlockedAddends>>();
  };
  const auto value = [&]<int kNumAddends>() {
    if constexpr (!kFewVariants && kNumAddends > 0)
      if (variant.blocked_addends) return with_layout.template operator()<kNumAddends, true>();
    with_layout.template operator()<kNumAddends, false>();
  };
  if (variant.kind == KernelVariant::wgrad)
    return variant.num_addends ? run.template operator()<WgradRows<true>>()
                               : run.template operator()<WgradRows<false>>();
  if (variant.kind == KernelVariant::value && variant.num_addends == 0) return value.template operator()<0>();
  if (variant.kind == KernelVariant::value && variant.num_addends == 1) return value.template operator()<1>();
  if constexpr (!kFewVariants) {
    if (variant.kind == KernelVariant::value && variant.num_addends == 2) return value.template operator()<2>();
    if (variant.kind == KernelVariant::value && variant.num_addends == 3) return value.template operator()<3>();
    if (variant.kind == KernelVariant::activation)
      return with_activation(variant, w, act ? act : act_grad, act_grad.has_value(), run);
  }
  run.template operator()<GenericRows>();
}

}  // namespace weft::kernels::CPU_CAPABILITY
