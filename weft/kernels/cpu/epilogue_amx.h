#pragma once
#include <c10/core/ScalarType.h>

#include <array>
#include <optional>

#include "weft/kernels/cpu/act_vec.h"
#include "weft/kernels/cpu/pack_amx.h"

// The epilogue of a 32 x 32 square of the product, one row at a time, so that it can run under the next square's tile
// products.

namespace weft::kernels::CPU_CAPABILITY {

/// How results are stored.
enum class Store {
  keep,
  stream,  // past the caches: whole aligned lines, and nobody reads them soon
};

/// A matrix of float32, bfloat16 or float16: row-major, or squares of 32 x 32, one column of squares behind the other,
/// which is the order in which a product makes them.
struct Place {
  char* data = nullptr;
  int64_t ld = 0;  // in values, from a row to the next
  at::ScalarType dtype = at::kFloat;
  Store store = Store::keep;
  int64_t squares = 0;  // in a column of squares; 0: row-major

  int64_t bytes() const { return dtype == at::kFloat ? 4 : 2; }
  char* at(int64_t row, int64_t column) const {
    if (squares == 0) return data + (row * ld + column) * bytes();
    const int64_t square = column / kPanel * squares + row / kPanel;
    return data + (square * kSquare + row % kPanel * ld + column % kPanel) * bytes();
  }
};

inline __mmask16 first(int64_t count) {
  return count >= 16 ? 0xffff : static_cast<__mmask16>((1U << std::max<int64_t>(count, 0)) - 1);
}

inline __m512i pack_bf16(__m512 v0, __m512 v1) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v1, v0)); }
inline __m512 widen_bf16(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

inline __m512 load16(const Place& from, int64_t row, int64_t column, __mmask16 mask) {
  const char* p = from.at(row, column);
  if (from.dtype == at::kFloat) return _mm512_maskz_loadu_ps(mask, p);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, p);
  if (from.dtype == at::kHalf) return _mm512_cvtph_ps(half);
  return widen_bf16(half);
}

inline void store16(const Place& to, int64_t row, int64_t column, __m512 v, __mmask16 mask) {
  char* p = to.at(row, column);
  if (to.dtype == at::kFloat) {
    _mm512_mask_storeu_ps(p, mask, v);
  } else if (to.dtype == at::kHalf) {
    _mm256_mask_storeu_epi16(p, mask, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  } else {
    _mm256_mask_storeu_epi16(p, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
  }
}

/// 32 neighbours; `left` of them exist.
inline void store32(const Place& to, int64_t row, int64_t column, __m512 v0, __m512 v1, int64_t left) {
  if (left >= kPanel && to.dtype == at::kBFloat16) {
    const auto pairs = pack_bf16(v0, v1);
    auto* p = reinterpret_cast<__m512i*>(to.at(row, column));
    to.store == Store::stream ? _mm512_stream_si512(p, pairs) : _mm512_storeu_si512(p, pairs);
    return;
  }
  store16(to, row, column, v0, first(left));
  store16(to, row, column + 16, v1, first(left - 16));
}

struct Work;
using RowFunction = void (*)(const Work&, const float* square, int64_t row, int64_t column);

constexpr int kMostAdds = 3;

/// The `Epilogue` of a call as raw memory; made once.
struct Work {
  int64_t rows = 0, columns = 0;  // of the product
  int64_t half = 0;               // gated: columns of a and of b
  int64_t reach = 0;              // panels beyond this column are not whole
  float scale = 1;
  const float* bias = nullptr;  // padded with 32 values
  Place out, pre, at, again;
  std::array<Place, kMostAdds> add;  // the first `adds` of them
  int adds = 0;
  float* sums = nullptr;                      // of this thread; padded likewise
  Bf16* tiles = nullptr;                      // outᵀ in tiles; all squares are whole then
  Bf16* turn = nullptr;                       // two squares of this thread, where rows wait for it
  int64_t ahead_rows = 0, ahead_columns = 0;  // from a square to the one after it
  ActParams act{Act{}};
  RowFunction row = nullptr;
};

inline void bring(const Work& w, const Place& place, int64_t row, int64_t column, int width) {
  if (!place.data || row + w.ahead_rows >= w.rows) return;
  const char* p = place.at(row + w.ahead_rows, column + w.ahead_columns);
  for (int i = 0; i < width * place.bytes(); i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
}

inline void add_sums(float* sums, __m512 v0, __m512 v1) {
  _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), v0));
  _mm512_storeu_ps(sums + 16, _mm512_add_ps(_mm512_loadu_ps(sums + 16), v1));
}

inline void finish32(const Work& w, int64_t row, int64_t column, __m512 v0, __m512 v1, int64_t left) {
  if (w.sums) add_sums(w.sums + column, v0, v1);
  for (int i = 0; i < w.adds; ++i) {
    v0 = _mm512_add_ps(v0, load16(w.add[i], row, column, first(left)));
    v1 = _mm512_add_ps(v1, load16(w.add[i], row, column + 16, first(left - 16)));
    bring(w, w.add[i], row, column, kPanel);
  }
  store32(w.out, row, column, v0, v1, left);
}

/// v = act(scale·P + bias) + add, 32 columns.
template <int kKind>
void value_row(const Work& w, const float* c, int64_t row, int64_t column) {
  const __m512 scale = _mm512_set1_ps(w.scale);
  __m512 v0 = _mm512_mul_ps(_mm512_load_ps(c), scale), v1 = _mm512_mul_ps(_mm512_load_ps(c + 256), scale);
  const int64_t left = w.columns - column;
  if (w.bias) {
    v0 = _mm512_add_ps(v0, _mm512_loadu_ps(w.bias + column));
    v1 = _mm512_add_ps(v1, _mm512_loadu_ps(w.bias + column + 16));
  }
  if (w.pre.data) store32(w.pre, row, column, v0, v1, left);
  if constexpr (kKind >= 0) {
    v0 = act_value<ActKind{kKind}>(v0, w.act);
    v1 = act_value<ActKind{kKind}>(v1, w.act);
  }
  finish32(w, row, column, v0, v1, left);
}

/// Gated: the square holds columns of b, the one before it in memory those of a.
template <ActKind kKind>
void gated_row(const Work& w, const float* c, int64_t row, int64_t column) {
  const __m512 scale = _mm512_set1_ps(w.scale);
  const int64_t left = w.half - column;
  __m512 v[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t at = column + 16 * i;
    const auto mask = first(left - 16 * i);
    __m512 a = _mm512_mul_ps(_mm512_load_ps(c - kSquare + 256 * i), scale);
    __m512 b = _mm512_mul_ps(_mm512_load_ps(c + 256 * i), scale);
    if (w.bias) {
      a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(mask, w.bias + at));
      b = _mm512_add_ps(b, _mm512_maskz_loadu_ps(mask, w.bias + w.half + at));
    }
    if (w.pre.data) {
      store16(w.pre, row, at, a, mask);
      store16(w.pre, row, w.half + at, b, mask);
    }
    v[i] = gated_value<kKind>(a, b, w.act);
  }
  finish32(w, row, column, v[0], v[1], left);
}

/// v = scale·P·act'(at).
template <ActKind kKind>
void slope_row(const Work& w, const float* c, int64_t row, int64_t column) {
  const __m512 scale = _mm512_set1_ps(w.scale);
  const int64_t left = w.columns - column;
  const __m512 x0 = load16(w.at, row, column, first(left)), x1 = load16(w.at, row, column + 16, first(left - 16));
  bring(w, w.at, row, column, kPanel);
  const auto [f0, s0] = act_both<kKind>(x0, w.act);
  const auto [f1, s1] = act_both<kKind>(x1, w.act);
  if (w.again.data) store32(w.again, row, column, f0, f1, left);
  finish32(w, row, column, _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(c), scale), s0),
           _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(c + 256), scale), s1), left);
}

/// Gated: da = v·f'(a)·h(b) in column j, db = v·f(a)·h'(b) in column N + j.
template <ActKind kKind>
void gated_slope_row(const Work& w, const float* c, int64_t row, int64_t column) {
  const __m512 scale = _mm512_set1_ps(w.scale);
  __m512 da[2], db[2], again[2];
  for (int i = 0; i < 2; ++i) {
    const auto mask = first(w.columns - column - 16 * i);
    const __m512 a = load16(w.at, row, column + 16 * i, mask);
    const __m512 b = load16(w.at, row, w.columns + column + 16 * i, mask);
    const __m512 dy = _mm512_mul_ps(_mm512_load_ps(c + 256 * i), scale);
    const auto g = gated_both<kKind>(dy, a, b, w.act);
    again[i] = g.value;
    da[i] = g.da;
    db[i] = g.db;
  }
  bring(w, w.at, row, column, kPanel);
  bring(w, w.at, row, w.columns + column, kPanel);
  const int64_t left = w.columns - column;
  if (w.again.data) store32(w.again, row, column, again[0], again[1], left);
  finish32(w, row, column, da[0], da[1], left);
  finish32(w, row, w.columns + column, db[0], db[1], left);
}

/// The row function of an epilogue.
inline RowFunction row_function(const std::optional<Act>& act, const std::optional<Act>& slope) {
  RowFunction row = value_row<-1>;
  if (const auto& any = act ? act : slope)
    with_kind(any->kind, [&](auto kind) {
      if constexpr (is_gated(kind))
        row = act ? gated_row<kind> : gated_slope_row<kind>;
      else
        row = act ? value_row<static_cast<int>(ActKind{kind})> : slope_row<kind>;
    });
  return row;
}

// ---- Whole rows, the common case ----------------------------------------------------------------------------------
// Everything bfloat16, or a float32 gradient; no masks and no choices. Such rows run inside the loop over
// tile products, so their state has to stay in registers: a store and a load of it per step cost more than the row.

inline __m512 load_bf16(const char* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

/// A matrix that a row is read from or written to, stepping down.
struct Walk {
  char* p;
  int64_t step;

  Walk(const Place& place, int64_t row, int64_t column)
      : p(place.data ? place.at(row, column) : nullptr), step(place.ld * place.bytes()) {}
};

template <Store kStore>
[[gnu::always_inline]] inline void put(char* p, __m512i v) {
  if constexpr (kStore == Store::stream)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v);
  else
    _mm512_storeu_si512(p, v);
}

/// v = act(scale·P + bias) + add. `pre` has the layout of `out`; addends are squares, or have rows of one length.
template <int kKind, bool kPre, int kAdds, Store kStore, bool kSquares = false>
class ValueRows {
 public:
  ValueRows(const Work& w, int64_t row, int64_t column)
      : out_(w.out.at(row, column)), step_(w.out.ld * 2), act_(&w.act) {
    if constexpr (kPre) pre_ = w.pre.at(row, column);
    for (int i = 0; i < kAdds; ++i) add_[i] = w.add[i].at(row, column);
    if constexpr (kAdds > 0 && !kSquares) {
      add_step_ = w.add[0].ld * 2;
      ahead_ = (w.ahead_rows * w.add[0].ld + w.ahead_columns) * 2;
    }
    scale_ = _mm512_set1_ps(w.scale);
    bias0_ = w.bias ? _mm512_loadu_ps(w.bias + column) : _mm512_setzero_ps();
    bias1_ = w.bias ? _mm512_loadu_ps(w.bias + column + 16) : _mm512_setzero_ps();
  }
  [[gnu::always_inline]] void row(const float* c) {
    __m512 v0 = _mm512_fmadd_ps(_mm512_load_ps(c), scale_, bias0_);
    __m512 v1 = _mm512_fmadd_ps(_mm512_load_ps(c + 256), scale_, bias1_);
    if constexpr (kPre) put<kStore>(pre_ + at_, pack_bf16(v0, v1));
    if constexpr (kKind >= 0) {
      v0 = act_value<ActKind{kKind}, Digits::bfloat16>(v0, *act_);
      v1 = act_value<ActKind{kKind}, Digits::bfloat16>(v1, *act_);
    }
#pragma GCC unroll 3
    for (int i = 0; i < kAdds; ++i) {
      v0 = _mm512_add_ps(v0, load_bf16(add_[i]));
      v1 = _mm512_add_ps(v1, load_bf16(add_[i] + 32));
      _mm_prefetch(add_[i] + (kSquares ? kSquare * 2 : ahead_), _MM_HINT_T0);
      add_[i] += kSquares ? kPanel * 2 : add_step_;
    }
    put<kStore>(out_ + at_, pack_bf16(v0, v1));
    at_ += step_;
  }
  void end(const Work&, int64_t, int64_t) {}

 private:
  char *out_, *pre_ = nullptr;
  std::array<char*, kAdds> add_;
  int64_t at_ = 0, step_, add_step_ = 0, ahead_ = 0;
  __m512 scale_, bias0_, bias1_;
  const ActParams* act_;
};

/// Gated: the square holds columns of b, the one before it in memory those of a.
template <ActKind kKind, Store kStore>
class GatedRows {
 public:
  GatedRows(const Work& w, int64_t row, int64_t column)
      : out_(w.out, row, column), a_(w.pre, row, column), to_b_(w.half * 2), act_(&w.act) {
    for (int i = 0; i < 2; ++i) {
      bias_a_[i] = w.bias ? _mm512_loadu_ps(w.bias + column + 16 * i) : _mm512_setzero_ps();
      bias_b_[i] = w.bias ? _mm512_loadu_ps(w.bias + w.half + column + 16 * i) : _mm512_setzero_ps();
    }
  }
  [[gnu::always_inline]] void row(const float* c) {
    const float* next = c + kSquare;  // of a
    _mm_prefetch(next, _MM_HINT_T0);
    _mm_prefetch(next + 256, _MM_HINT_T0);
    const __m512 a0 = _mm512_add_ps(_mm512_load_ps(c - kSquare), bias_a_[0]);
    const __m512 a1 = _mm512_add_ps(_mm512_load_ps(c - kSquare + 256), bias_a_[1]);
    const __m512 b0 = _mm512_add_ps(_mm512_load_ps(c), bias_b_[0]);
    const __m512 b1 = _mm512_add_ps(_mm512_load_ps(c + 256), bias_b_[1]);
    if (a_.p) {
      put<kStore>(a_.p, pack_bf16(a0, a1));
      put<kStore>(a_.p + to_b_, pack_bf16(b0, b1));
      a_.p += a_.step;
    }
    put<kStore>(out_.p, pack_bf16(gated_value<kKind, Digits::bfloat16>(a0, b0, *act_),
                                  gated_value<kKind, Digits::bfloat16>(a1, b1, *act_)));
    out_.p += out_.step;
  }
  void end(const Work&, int64_t, int64_t) {}

 private:
  Walk out_, a_;
  int64_t to_b_;
  __m512 bias_a_[2], bias_b_[2];
  const ActParams* act_;
};

/// A square of the result, whose rows lie in `rows`, into its two tiles of the transpose.
inline void put_tiles(const Work& w, const Bf16* rows, int64_t row, int64_t column) {
  const int64_t square = column / kPanel * (w.rows / kPanel) + row / kPanel;
  pack_pair<true, true>(rows, kPanel, w.tiles + square * 2 * kTile);
}

/// v = P·act'(at), with act(at) and the sums of the columns beside it. All matrices have rows of one length.
template <ActKind kKind, bool kAgain, Store kStore>
class SlopeRows {
 public:
  SlopeRows(const Work& w, int64_t row, int64_t column)
      : out_(w.out.at(row, column)), x_(w.at.at(row, column)), turn_(w.turn), step_(w.out.ld * 2), act_(&w.act) {
    if constexpr (kAgain) again_ = w.again.at(row, column);
    ahead_ = (w.ahead_rows * w.at.ld + w.ahead_columns) * 2;
  }
  [[gnu::always_inline]] void row(const float* c) {
    const auto [f0, s0] = act_both<kKind, Digits::bfloat16>(load_bf16(x_ + at_), *act_);
    const auto [f1, s1] = act_both<kKind, Digits::bfloat16>(load_bf16(x_ + at_ + 32), *act_);
    _mm_prefetch(x_ + at_ + ahead_, _MM_HINT_T0);
    if constexpr (kAgain) put<kStore>(again_ + at_, pack_bf16(f0, f1));
    const __m512 v0 = _mm512_mul_ps(_mm512_load_ps(c), s0), v1 = _mm512_mul_ps(_mm512_load_ps(c + 256), s1);
    sum0_ = _mm512_add_ps(sum0_, v0);
    sum1_ = _mm512_add_ps(sum1_, v1);
    const __m512i v = pack_bf16(v0, v1);
    put<kStore>(out_ + at_, v);
    if (turn_) {
      _mm512_store_si512(turn_, v);
      turn_ += kPanel;
    }
    at_ += step_;
  }
  void end(const Work& w, int64_t row, int64_t column) {
    if (w.sums) add_sums(w.sums + column, sum0_, sum1_);
    if (w.turn) put_tiles(w, w.turn, row, column);
  }

 private:
  char *out_, *x_, *again_ = nullptr;
  Bf16* turn_;
  int64_t at_ = 0, step_, ahead_;
  __m512 sum0_ = _mm512_setzero_ps(), sum1_ = _mm512_setzero_ps();
  const ActParams* act_;
};

/// Gated: `at` and the result have a in column j and b in column N + j.
template <ActKind kKind, Store kStore>
class GatedSlopeRows {
 public:
  GatedSlopeRows(const Work& w, int64_t row, int64_t column)
      : da_(w.out, row, column),
        at_(w.at, row, column),
        again_(w.again, row, column),
        turn_(w.turn),
        out_b_(w.columns * w.out.bytes()),
        at_b_(w.columns * w.at.bytes()),
        act_(&w.act) {
    ahead_ = (w.ahead_rows * w.at.ld + w.ahead_columns) * w.at.bytes();
  }
  [[gnu::always_inline]] void row(const float* c) {
    const auto g0 =
        gated_both<kKind, Digits::bfloat16>(_mm512_load_ps(c), load_bf16(at_.p), load_bf16(at_.p + at_b_), *act_);
    const auto g1 = gated_both<kKind, Digits::bfloat16>(_mm512_load_ps(c + 256), load_bf16(at_.p + 32),
                                                        load_bf16(at_.p + at_b_ + 32), *act_);
    _mm_prefetch(at_.p + ahead_, _MM_HINT_T0);
    _mm_prefetch(at_.p + ahead_ + at_b_, _MM_HINT_T0);
    at_.p += at_.step;
    if (again_.p) {
      put<kStore>(again_.p, pack_bf16(g0.value, g1.value));
      again_.p += again_.step;
    }
    for (int i = 0; i < 4; ++i)
      sums_[i] = _mm512_add_ps(sums_[i], i == 0 ? g0.da : i == 1 ? g1.da : i == 2 ? g0.db : g1.db);
    const __m512i da = pack_bf16(g0.da, g1.da), db = pack_bf16(g0.db, g1.db);
    put<kStore>(da_.p + out_b_, db);
    put<kStore>(da_.p, da);
    da_.p += da_.step;
    if (turn_) {
      _mm512_store_si512(turn_, da);
      _mm512_store_si512(turn_ + kSquare, db);
      turn_ += kPanel;
    }
  }
  void end(const Work& w, int64_t row, int64_t column) {
    if (w.sums) {
      add_sums(w.sums + column, sums_[0], sums_[1]);
      add_sums(w.sums + w.columns + column, sums_[2], sums_[3]);
    }
    if (!w.turn) return;
    put_tiles(w, w.turn, row, column);
    put_tiles(w, w.turn + kSquare, row, w.columns + column);
  }

 private:
  Walk da_, at_, again_;
  Bf16* turn_;
  int64_t out_b_, at_b_, ahead_;
  __m512 sums_[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  const ActParams* act_;
};

/// out = scale·P, or out += scale·P, in float32: a weight gradient.
template <bool kAdd>
class GradientRows {
 public:
  GradientRows(const Work& w, int64_t row, int64_t column) : out_(w.out, row, column), scale_(_mm512_set1_ps(w.scale)) {
    ahead_ = (w.ahead_rows * w.out.ld + w.ahead_columns) * 4;
  }
  [[gnu::always_inline]] void row(const float* c) {
    const __m512 v0 = _mm512_load_ps(c), v1 = _mm512_load_ps(c + 256);
    if constexpr (kAdd) {
      _mm512_storeu_ps(out_.p, _mm512_fmadd_ps(v0, scale_, _mm512_loadu_ps(out_.p)));
      _mm512_storeu_ps(out_.p + 64, _mm512_fmadd_ps(v1, scale_, _mm512_loadu_ps(out_.p + 64)));
      _mm_prefetch(out_.p + ahead_, _MM_HINT_T0);
      _mm_prefetch(out_.p + ahead_ + 64, _MM_HINT_T0);
    } else {
      _mm512_storeu_ps(out_.p, _mm512_mul_ps(v0, scale_));
      _mm512_storeu_ps(out_.p + 64, _mm512_mul_ps(v1, scale_));
      _mm_prefetch(out_.p + ahead_, _MM_HINT_T0);
      _mm_prefetch(out_.p + ahead_ + 64, _MM_HINT_T0);
    }
    out_.p += out_.step;
  }
  void end(const Work&, int64_t, int64_t) {}

 private:
  Walk out_;
  int64_t ahead_;
  __m512 scale_;
};

/// Any epilogue: nothing runs inside the loop, each square is finished behind it.
class AnyRows {
 public:
  AnyRows(const Work&, int64_t, int64_t) {}
  void row(const float*) {}
  void end(const Work&, int64_t, int64_t) {}
};

/// A square whose rows are still to be finished: inside the next square's loop if it is whole and has a lean form.
template <class Rows>
class Pending {
 public:
  static constexpr bool kLean = !std::is_same_v<Rows, AnyRows>;

  Pending(const Work& w, const float* square, int64_t row, int64_t column)
      : rows_(w, row, column), c_(square), row_(row), column_(column) {}

  /// One row, if one is left.
  [[gnu::always_inline]] void step() {
    if (left_ == 0) return;
    rows_.row(c_);
    c_ += 16;
    if (--left_ == 16) c_ += 256;
  }
  void finish(const Work& w) {
    while (left_ > 0) step();
    if (whole_) rows_.end(w, row_, column_);
  }
  /// Starts, or finishes at once what has no lean form.
  void start(const Work& w) {
    const int64_t rows = std::min<int64_t>(kPanel, w.rows - row_);
    const bool lean = kLean && column_ + kPanel <= w.reach;
    whole_ = lean && rows == kPanel;
    if (whole_) {
      left_ = kPanel;
      return;
    }
    if (lean) {
      for (int64_t i = 0; i < rows; ++i) rows_.row(c_ + (i >> 4) * 512 + (i & 15) * 16);
      return rows_.end(w, row_, column_);
    }
    for (int64_t i = 0; i < rows; ++i) w.row(w, c_ + (i >> 4) * 512 + (i & 15) * 16, row_ + i, column_);
  }

 private:
  Rows rows_;
  const float* c_;
  int64_t row_, column_;
  int left_ = 0;
  bool whole_ = false;
};

/// Which class of rows serves an epilogue. Rows of one form can be worked on together.
struct Form {
  enum Class { any, gradient, value, activation } rows = any;
  int adds = 0;
  bool squares = false;  // of the addends
  Store store = Store::keep;
  bool operator==(const Form&) const = default;
};

inline Form form_of(const Work& w, const std::optional<Act>& act, const std::optional<Act>& slope) {
  const bool bare = !act && !slope && !w.pre.data && !w.sums;
  if (bare && w.out.dtype == at::kFloat && !w.bias && (w.adds == 0 || (w.adds == 1 && w.add[0].data == w.out.data)))
    return {.rows = Form::gradient, .adds = w.adds};
  const bool gated = (act && act->gated()) || (slope && slope->gated());
  bool lean = w.scale == 1 || !(gated || slope);
  const auto look_at = [&](const Place& p) {
    if (p.data) lean = lean && p.dtype == at::kBFloat16 && (gated || p.ld == w.out.ld);
  };
  for (const auto* p : {&w.out, &w.pre, &w.again, &w.at}) look_at(*p);
  const bool squares = w.adds > 0 && w.add[0].squares > 0;
  for (int i = 0; i < w.adds; ++i)
    lean = lean && w.add[i].dtype == at::kBFloat16 && w.add[i].ld == w.add[0].ld && (w.add[i].squares > 0) == squares;
  if (!lean) return {};
  if (bare) return {.rows = Form::value, .adds = w.adds, .squares = squares, .store = w.out.store};
  if ((!act && !slope) || w.adds > 0 || (slope && w.bias) || (act && w.sums)) return {};
  // All results of a row are stored alike, so each of them has to be aligned.
  const auto streams = [](const Place& p) { return !p.data || p.store == Store::stream; };
  const bool all = streams(w.out) && streams(w.pre) && streams(w.again);
  return {.rows = Form::activation, .store = all ? Store::stream : Store::keep};
}

/// Activations whose rows run under the products; those of rarer ones behind them.
constexpr bool is_frequent(ActKind kind) {
  return kind == ActKind::gelu || kind == ActKind::silu || kind == ActKind::relu || kind == ActKind::srelu ||
         kind == ActKind::swiglu || kind == ActKind::geglu;
}

/// Calls run with the rows of an activation, or of its slope.
template <class Run>
void with_activation(const Form& form, const Work& w, const std::optional<Act>& act, bool slope, Run&& run) {
  const auto value = [&]<ActKind kKind, Store kStore>() {
    constexpr int k = static_cast<int>(kKind);
    if (slope)
      return w.again.data ? run.template operator()<SlopeRows<kKind, true, kStore>>()
                          : run.template operator()<SlopeRows<kKind, false, kStore>>();
    w.pre.data ? run.template operator()<ValueRows<k, true, 0, kStore>>()
               : run.template operator()<ValueRows<k, false, 0, kStore>>();
  };
  const auto gated = [&]<ActKind kKind, Store kStore>() {
    slope ? run.template operator()<GatedSlopeRows<kKind, kStore>>()
          : run.template operator()<GatedRows<kKind, kStore>>();
  };
  const auto any = [&]<ActKind kKind, Store kStore>() {
    if constexpr (is_gated(kKind))
      gated.template operator()<kKind, kStore>();
    else
      value.template operator()<kKind, kStore>();
  };
  if (!is_frequent(act->kind)) return run.template operator()<AnyRows>();
  with_kind(act->kind, [&](auto kind) {
    if constexpr (is_frequent(kind))
      form.store == Store::stream ? any.template operator()<kind, Store::stream>()
                                  : any.template operator()<kind, Store::keep>();
  });
}

/// Calls run with the class of rows of a form; `few` leaves out the activations and more than one addend.
template <bool kFew, class Run>
void with_rows(const Form& form, const Work& w, const std::optional<Act>& act, const std::optional<Act>& slope,
               Run&& run) {
  const auto laid = [&]<int kAdds, bool kSquares>() {
    form.store == Store::stream ? run.template operator()<ValueRows<-1, false, kAdds, Store::stream, kSquares>>()
                                : run.template operator()<ValueRows<-1, false, kAdds, Store::keep, kSquares>>();
  };
  const auto value = [&]<int kAdds>() {
    if constexpr (!kFew && kAdds > 0)
      if (form.squares) return laid.template operator()<kAdds, true>();
    laid.template operator()<kAdds, false>();
  };
  if (form.rows == Form::gradient)
    return form.adds ? run.template operator()<GradientRows<true>>() : run.template operator()<GradientRows<false>>();
  if (form.rows == Form::value && form.adds == 0) return value.template operator()<0>();
  if (form.rows == Form::value && form.adds == 1) return value.template operator()<1>();
  if constexpr (!kFew) {
    if (form.rows == Form::value && form.adds == 2) return value.template operator()<2>();
    if (form.rows == Form::value && form.adds == 3) return value.template operator()<3>();
    if (form.rows == Form::activation) return with_activation(form, w, act ? act : slope, slope.has_value(), run);
  }
  run.template operator()<AnyRows>();
}

}  // namespace weft::kernels::CPU_CAPABILITY
