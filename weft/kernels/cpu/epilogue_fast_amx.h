#pragma once
#include "weft/kernels/cpu/epilogue_rows_amx.h"

// The unmasked fast path of the epilogue.
// For full rows where every matrix is bfloat16, or the result is a float32 weight gradient: no masks and no branches on
// dtype. These rows run inside the loop over tile multiplications, so their state must stay in registers: spilling it
// at each k-step costs more than the row itself.

namespace weft::kernels::CPU_CAPABILITY {

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

}  // namespace weft::kernels::CPU_CAPABILITY
