#pragma once
#include "weft/kernels/cpu/epilogue_amx.h"
#include "weft/kernels/cpu/macrokernel_amx.h"
#include "weft/kernels/cpu/pack_amx.h"

// GEMM of few rows with a weight that is read only once: Yᵀ = W Xᵀ. W [N, K] is the left operand and its tiles are
// loaded in place, without packing; only X is packed. Accumulators hold Yᵀ. Included by *_amx.cpp only.

namespace weft::kernels::CPU_CAPABILITY {

/// Y = X Wᵀ + s·b for the rows of one group.
struct UnpackedWeightGemm {
  const Bf16* x = nullptr;  // [rows, k]
  int64_t ldx = 0, rows = 0;
  const Bf16* w = nullptr;  // [n, k]
  int64_t n = 0, k = 0;
  MatrixView bias, scales, out;  // [1, n], [rows, 1], [rows, n]; bias and scales are optional (null data)

  int steps() const { return static_cast<int>(ceil_div(k, kKStep)); }
  /// Tiles of 16 rows of W. If n % 16 ≠ 0, the last tile starts at n - 16 and overlaps the one before.
  int64_t tiles() const { return (n + 15) / 16; }
  int64_t start(int64_t tile) const { return std::max<int64_t>(0, std::min(16 * tile, n - 16)); }
};

constexpr int kMaxTiles = 4;  // tiles of W that are multiplied together

/// Tiles of W to multiply: loaded in place, except for a partial last k-step, which is copied.
struct WeightTiles {
  int64_t first = 0;            // index of the first tile
  int count = 0;                // number of tiles; entries beyond it repeat the last tile
  const Bf16* tile[kMaxTiles];  // at k = 0
  int64_t stride = 0;           // bytes between rows of a tile
  int64_t step = 0;             // elements between k-steps
  int full = 0;                 // full k-steps
  const Bf16* tail = nullptr;   // the partial last k-step of each tile, packed; null: none
  alignas(64) float bias[16 * kMaxTiles];
};

/// An accumulator tile: c[i][j] belongs to column i of the tile and row `row` + j of Y.
struct OutputTile {
  const WeightTiles* tiles;
  int tile;  // of `tiles`
  int64_t row;
  const float* c;
};

/// The scales of 16 rows; 1 if there are none.
inline __m512 row_scales(const UnpackedWeightGemm& p, int64_t row) {
  if (!p.scales.data) return _mm512_set1_ps(1);
  if (p.scales.ld == 1) return load16(p.scales, row, 0, lane_mask(p.rows - row));
  alignas(64) float values[16] = {};
  for (int j = 0; j < std::min<int64_t>(16, p.rows - row); ++j)
    values[j] = _mm512_cvtss_f32(load16(p.scales, row + j, 0, 1));
  return _mm512_load_ps(values);
}

/// Adds the bias and stores a tile of any size and dtype, with masks.
inline void store_tile_masked(const UnpackedWeightGemm& p, const OutputTile& b) {
  const __m512 scales = row_scales(p, b.row);
  const float* bias = b.tiles->bias + 16 * b.tile;
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    r[i] = _mm512_castps_si512(_mm512_fmadd_ps(scales, _mm512_set1_ps(bias[i]), _mm512_load_ps(b.c + 16 * i)));
  transpose16(r);
  const int64_t tile = b.tiles->first + b.tile, column = p.start(tile);
  const auto mask = static_cast<__mmask16>(lane_mask(p.n - column) & (0xffffU << (16 * tile - column)));
  alignas(64) __m512i rows[16];
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) _mm512_store_si512(rows + j, r[j]);
  for (int j = 0; j < std::min<int64_t>(16, p.rows - b.row); ++j)
    store16(p.out, b.row + j, column, _mm512_castsi512_ps(rows[j]), mask);
}

/// Adds the bias and stores a tile of 16 full columns as bfloat16, in rows `next` bytes apart. Rounds pairs of columns,
/// then transposes.
[[gnu::always_inline]] inline void store_tile_bf16(const UnpackedWeightGemm& p, const OutputTile& b, char* to,
                                                   int64_t next) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const __m512 scales = row_scales(p, b.row);
  const float* bias = b.tiles->bias + 16 * b.tile;
  const auto sum = [&](int i) {
    return _mm512_fmadd_ps(scales, _mm512_set1_ps(bias[i]), _mm512_load_ps(b.c + 16 * i));
  };
  __m512i v[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) v[i] = interleave(pack_bf16(sum(2 * i), sum(2 * i + 1)));
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // v[j]: the first four pairs of row 4·lane + j; v[4 + j]: the last four.
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  const auto store_row = [&](int row, __m256i values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + row * next), values);
  };
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i first = _mm512_permutex2var_epi64(v[j], low, v[4 + j]);
    const __m512i last = _mm512_permutex2var_epi64(v[j], high, v[4 + j]);
    store_row(j, _mm512_castsi512_si256(first));
    store_row(4 + j, _mm512_extracti64x4_epi64(first, 1));
    store_row(8 + j, _mm512_castsi512_si256(last));
    store_row(12 + j, _mm512_extracti64x4_epi64(last, 1));
  }
}

[[gnu::always_inline]] inline void store_tile(const UnpackedWeightGemm& p, const OutputTile& b) {
  const int64_t column = 16 * (b.tiles->first + b.tile);
  if (p.out.dtype != at::kBFloat16 || column + 16 > p.n) return store_tile_masked(p, b);
  char* to = p.out.at(b.row, column);
  const int64_t next = p.out.ld * 2, rows = p.rows - b.row;
  if (rows >= 16) return store_tile_bf16(p, b, to, next);
  alignas(32) __m256i all[16];
  store_tile_bf16(p, b, reinterpret_cast<char*>(all), 32);
  for (int64_t j = 0; j < rows; ++j) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j * next), all[j]);
}

/// Tiles 0 to 3 += two tiles of W times 32 rows of X, for one k-step. Keeps W (`kKeepW`) or X in L1; loads the other
/// with the T1 hint.
template <bool kKeepW>
[[gnu::always_inline]] inline void unpacked_weight_step(const Bf16* low, const Bf16* high, int64_t stride,
                                                        const Bf16* x) {
  if constexpr (kKeepW) {
    _tile_stream_loadd(6, x, 64);
    _tile_loadd(4, low, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, x + kTileElems, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, high, stride);
  } else {
    _tile_loadd(6, x, 64);
    _tile_stream_loadd(4, low, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, x + kTileElems, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stream_loadd(5, high, stride);
  }
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

/// Prefetches a weight `kPrefetchDistance` bytes ahead of its use, also past its end: the next weight usually follows
/// in memory.
class WeightPrefetcher {
 public:
  /// `from`: the first element to be used. Keeps what is already prefetched ahead of it.
  void start(const Bf16* from) {
    const auto* first = reinterpret_cast<const char*>(from);
    if (next_ < first || next_ > first + 2 * kPrefetchDistance) next_ = first;
  }
  /// Spreads the prefetches of W up to `to` over `steps` k-steps. With `sparse`, touches every eighth cache line and
  /// leaves the others to the hardware prefetcher.
  void set_pace(const Bf16* to, int64_t steps, bool sparse) {
    const auto* end = reinterpret_cast<const char*>(to) + kPrefetchDistance;
    line_stride_ = sparse ? 512 : 64;
    const int64_t lines = end > next_ ? (end - next_) / line_stride_ : 0;
    per_step_ = static_cast<int>((lines + steps - 1) / std::max<int64_t>(steps, 1));
  }
  [[gnu::always_inline]] void step() {
    for (int i = 0; i < per_step_; ++i, next_ += line_stride_) _mm_prefetch(next_, _MM_HINT_T1);
  }

 private:
  static constexpr int64_t kPrefetchDistance = 64 << 10;
  const char* next_ = nullptr;
  int per_step_ = 0;
  int64_t line_stride_ = 64;
};

/// Multiplies tiles of W by packed rows of X. One per thread.
class UnpackedWeightMultiplier {
 public:
  UnpackedWeightMultiplier() : scratch_(Scratch::current()) {}

  /// Multiplies tiles [begin, end) of W by all rows.
  void run(const UnpackedWeightGemm& p, int64_t begin, int64_t end) {
    p_ = p;
    steps_ = p.steps();
    steps_per_store_ = std::max(1, steps_ / 4);
    const TileConfig config;
    const int64_t panel = static_cast<int64_t>(steps_) * 2 * kTileElems;
    const int64_t max_rows = std::max<int64_t>(1, kResidentBytes / 2 / panel) * kBlockDim;
    for (int64_t row = 0; row < p_.rows; row += max_rows) {
      const int64_t rows = std::min(max_rows, p_.rows - row);
      prefetcher_.start(p_.w + p_.start(begin) * p_.k);
      prefetcher_.set_pace(p_.w + p_.start(begin) * p_.k, panels_of(rows) * steps_, rows <= kBlockDim);
      pack(row, rows);
      const int64_t tiles_together = rows > 16 ? 2 : kMaxTiles;  // two tiles stay in L1 for all rows
      for (int64_t t = begin; t < end; t += tiles_together)
        multiply_rows(t, static_cast<int>(std::min(tiles_together, end - t)), row, rows);
    }
    finish();
  }

 private:
  /// Packs panels of 32 rows; a remainder of at most 16 rows becomes a panel of 16.
  void pack(int64_t row, int64_t rows) {
    Operand x;
    x.data = p_.x + row * p_.ldx;
    x.ld = p_.ldx;
    x.extent = rows;
    x.k = p_.k;
    x.left = false;
    Bf16* to = scratch_.resident;
    int64_t r = 0;
    for (; rows - r > 16; r += kBlockDim, to += 2 * kTileElems * steps_) {
      pack_panel<false, true>(x, r, 0, steps_, to);
      for (int s = 0; s < steps_; ++s) prefetcher_.step();
    }
    if (r >= rows) return;
    for (int s = 0; s < steps_; ++s) {
      pack_tile<false, true>(x.at(r, s * kKStep), x.ld, static_cast<int>(rows - r), depth(s), to + s * kTileElems,
                             nullptr);
      prefetcher_.step();
    }
  }
  /// Elements of k in a k-step.
  int depth(int step) const { return static_cast<int>(std::min<int64_t>(kKStep, p_.k - step * kKStep)); }

  /// Multiplies `count` tiles from t on by the packed rows.
  void multiply_rows(int64_t t, int count, int64_t row, int64_t rows) {
    const auto& w = load_weight_tiles(t, count);
    prefetcher_.set_pace(p_.w + p_.start(t + count) * p_.k, panels_of(rows) * w.full, rows <= kBlockDim);
    const Bf16* x = scratch_.resident;
    int64_t r = 0;
    for (; rows - r > 16; r += kBlockDim, x += 2 * kTileElems * steps_)
      rows > kBlockDim ? multiply_32_rows<true>(w, x, row + r) : multiply_32_rows<false>(w, x, row + r);
    if (r < rows) multiply_16_rows(w, x, row + r);
  }

  /// Copies a partial last k-step, or all of W if it has fewer than 16 rows.
  const WeightTiles& load_weight_tiles(int64_t t, int count) {
    auto& out = tiles_[weight_parity_ ^= 1];
    const int rows = static_cast<int>(std::min<int64_t>(16, p_.n)), ks = static_cast<int>(p_.k % kKStep);
    const bool copied = rows < 16;
    out.first = t;
    out.count = count;
    out.stride = copied ? 64 : p_.k * 2;
    out.step = copied ? kTileElems : kKStep;
    out.full = copied ? steps_ : static_cast<int>(p_.k / kKStep);
    out.tail = nullptr;
    for (int i = 0; i < kMaxTiles; ++i) {
      const int64_t start = p_.start(t + std::min(i, count - 1));
      out.tile[i] = copied ? scratch_.streamed : p_.w + start * p_.k;
      const auto mask = lane_mask(p_.n - start);
      _mm512_store_ps(out.bias + 16 * i, p_.bias.data ? load16(p_.bias, 0, start, mask) : _mm512_setzero_ps());
    }
    if (copied) {
      for (int s = 0; s < steps_; ++s)
        pack_tile<true, true>(p_.w + s * kKStep, p_.k, rows, depth(s), scratch_.streamed + s * kTileElems, nullptr);
    } else if (ks > 0) {
      for (int i = 0; i < kMaxTiles; ++i)
        pack_tile<true, true>(out.tile[i] + out.full * kKStep, p_.k, 16, ks, scratch_.streamed + i * kTileElems,
                              nullptr);
      out.tail = scratch_.streamed;
    }
    tile_fence();
    return out;
  }

  /// Two tiles times 32 rows. The operand that is reused next stays in L1: W if more rows follow, otherwise X.
  template <bool kKeepW>
  [[gnu::flatten]] void multiply_32_rows(const WeightTiles& w, const Bf16* x, int64_t row) {
    zero_accumulators();
    const Bf16 *a = w.tile[0], *b = w.tile[1];
    for (int s = 0; s < w.full; ++s, a += w.step, b += w.step) {
      unpacked_weight_step<kKeepW>(a, b, w.stride, x);
      x += 2 * kTileElems;
      per_step();
    }
    if (w.tail) unpacked_weight_step<kKeepW>(w.tail, w.tail + kTileElems, 64, x);
    const float* c = spill_accumulators();
    for (int i = 0; i < 2 * w.count; ++i) deferred_[i] = {&w, i / 2, row + 16 * (i % 2), c + 256 * i};
    tiles_left_ = 2 * w.count;
  }

  /// Up to four tiles times 16 rows.
  [[gnu::flatten]] void multiply_16_rows(const WeightTiles& w, const Bf16* x, int64_t row) {
    zero_accumulators();
    const Bf16 *a = w.tile[0], *b = w.tile[1], *c = w.tile[2], *d = w.tile[3];
    const auto step = [&](const Bf16* t0, const Bf16* t1, const Bf16* t2, const Bf16* t3, int64_t stride) {
      _tile_stream_loadd(6, x, 64);
      _tile_loadd(4, t0, stride);
      _tile_dpbf16ps(0, 4, 6);
      x += kTileElems;
      if (w.count == 1) return;
      _tile_loadd(5, t1, stride);
      _tile_dpbf16ps(1, 5, 6);
      if (w.count == 2) return;
      _tile_loadd(7, t2, stride);
      _tile_dpbf16ps(2, 7, 6);
      _tile_loadd(4, t3, stride);
      _tile_dpbf16ps(3, 4, 6);
    };
    for (int s = 0; s < w.full; ++s, a += w.step, b += w.step, c += w.step, d += w.step) {
      step(a, b, c, d, w.stride);
      per_step();
    }
    if (w.tail) step(w.tail, w.tail + kTileElems, w.tail + 2 * kTileElems, w.tail + 3 * kTileElems, 64);
    const float* sums = spill_accumulators();
    for (int i = 0; i < w.count; ++i) deferred_[i] = {&w, i, row, sums + 256 * i};
    tiles_left_ = w.count;
  }

  /// Runs in each k-step: prefetches W and, every `steps_per_store_` k-steps, stores a tile of the previous block.
  [[gnu::always_inline]] void per_step() {
    prefetcher_.step();
    if (tiles_left_ > 0 && --steps_until_store_ <= 0) {
      store_one_tile();
      steps_until_store_ = steps_per_store_;
    }
  }

  /// Stores the four accumulator tiles in scratch, after the tiles of the previous block.
  const float* spill_accumulators() {
    finish();
    float* c = scratch_.block[block_parity_ ^= 1];
    store_accumulators(c);
    return c;
  }
  [[gnu::always_inline]] void store_one_tile() {
    const auto& b = deferred_[--tiles_left_];
    tile_fence();
    if (b.row < p_.rows) store_tile(p_, b);
    tile_fence();
  }
  void finish() {
    while (tiles_left_ > 0) store_one_tile();
  }

  UnpackedWeightGemm p_;
  int steps_ = 0, steps_per_store_ = 1, steps_until_store_ = 0;
  Scratch& scratch_;
  WeightTiles tiles_[2];  // current tiles, and the tiles of the accumulators not yet stored
  OutputTile deferred_[4];
  int tiles_left_ = 0, weight_parity_ = 0, block_parity_ = 0;
  WeightPrefetcher prefetcher_;
};

}  // namespace weft::kernels::CPU_CAPABILITY
