#pragma once
#include <algorithm>
#include <cstring>

#include "weft/kernels/cpu/gemm_grid.h"
#include "weft/kernels/cpu/tiles_amx.h"

// Packs matrices into 1 KB tiles:
//   left operand   tile = 16 rows × 32 k                  [row][k]
//   right operand  tile = 32 k × 16 columns, k in pairs   [k/2][column][k%2]
// A panel is 32 rows (columns) wide: [k/32][2][tile].

namespace weft::kernels::CPU_CAPABILITY {

class SharedPanels;

/// A GEMM operand in memory: `extent` rows (left) or columns (right) of length `k`. One dimension is contiguous, the
/// other has stride `ld`.
struct Operand {
  const Bf16* data = nullptr;
  int64_t ld = 0;
  int64_t extent = 0, k = 0;
  bool left = true;
  bool k_contiguous = true;
  int64_t half = 0;                // right, gated: columns of a; panels alternate between 32 columns of a and of b
  const Bf16* packed = nullptr;    // the whole operand packed, panel after panel; null: not packed
  int64_t packed_k = 0;            // length of the packed panels if they are longer than `k`
  SharedPanels* shared = nullptr;  // packs it together with other threads; null: each thread packs what it needs
  Bf16* second_dst = nullptr;      // also receives the packed tiles, in the same order, by non-temporal stores

  int64_t panels() const { return half ? panels_of(half) * 2 : panels_of(extent); }
  /// Panels that one thread must multiply together: a gated pair, or one.
  int64_t panels_per_unit() const { return half ? 2 : 1; }
  /// Offset of a panel at k0 in the packed operand.
  int64_t packed_offset(int64_t panel, int64_t k0) const {
    return (panel * ceil_div(std::max(k, packed_k), kKStep) + k0 / kKStep) * 2 * kTileElems;
  }
  const Bf16* packed_panel(int64_t panel, int64_t k0) const { return packed + packed_offset(panel, k0); }

  /// The part of K from `begin`, a multiple of kKStep, to `end`.
  Operand k_slice(int64_t begin, int64_t end) const {
    auto out = *this;
    out.k = end - begin;
    if (data) out.data = at(0, begin);
    if (packed) out.packed = packed_panel(0, begin), out.packed_k = std::max(k, packed_k);
    return out;
  }

  const Bf16* at(int64_t p, int64_t k0) const { return data + (k_contiguous ? p * ld + k0 : k0 * ld + p); }
};

constexpr int64_t kStripPanels = 8;  // panels packed together if K is not the contiguous dimension

/// Transposes a 16 × 16 matrix of 32-bit elements.
[[gnu::always_inline]] inline void transpose16(__m512i* r) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

/// x0 … x15 y0 … y15 → x0 y0 x1 y1 …
inline __m512i interleave(__m512i halves) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
}
inline __m512i interleave(__m256i x, __m256i y) {
  return interleave(_mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1));
}

/// Loads a tile that is contiguous along k (16 rows of 32), with zeros beyond `rows` and `ks`.
[[gnu::always_inline]] inline void load_along_k(const Bf16* src, int64_t ld, int rows, int ks, __m512i* r) {
  if (rows == 16 && ks == kKStep) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src + i * ld);
    return;
  }
  const __mmask32 mask = ks >= kKStep ? ~__mmask32{0} : (__mmask32{1} << ks) - 1;
  for (int i = 0; i < 16; ++i) r[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, src + i * ld) : _mm512_setzero_si512();
}

/// Loads a tile that is not contiguous along k (for each of 32 k, 16 adjacent elements) as 16 interleaved pairs of k.
[[gnu::always_inline]] inline void load_pairs(const Bf16* src, int64_t ld, int rows, int ks, __m512i* r) {
  if (rows == 16 && ks == kKStep) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      r[i] = interleave(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 2 * i * ld)),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + (2 * i + 1) * ld)));
    return;
  }
  const __mmask16 mask = rows >= 16 ? 0xffff : (__mmask16{1} << rows) - 1;
  const auto row = [&](int k) {
    return k < ks ? _mm256_maskz_loadu_epi16(mask, src + k * ld) : _mm256_setzero_si256();
  };
  for (int i = 0; i < 16; ++i) r[i] = interleave(row(2 * i), row(2 * i + 1));
}

/// Packs one tile; full tiles take the branch-free path. `second_dst` may be null.
template <bool kLeft, bool kAlongK>
inline void pack_tile(const Bf16* src, int64_t ld, int rows, int ks, Bf16* dst, Bf16* second_dst) {
  __m512i r[16];
  if constexpr (kAlongK)
    load_along_k(src, ld, rows, ks, r);
  else
    load_pairs(src, ld, rows, ks, r);
  if constexpr (kLeft != kAlongK) transpose16(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + i * kKStep, r[i]);
  if (!second_dst) return;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_stream_si512(reinterpret_cast<__m512i*>(second_dst + i * kKStep), r[i]);
}

/// First row (column) of tile `h` (0 or 1) of the panel at p.
inline int64_t tile_start(const Operand& m, int64_t p, int h) {
  if (m.half == 0) return p + 16 * h;
  const int64_t panel = p / kBlockDim;
  return panel / 2 * kBlockDim + panel % 2 * m.half + 16 * h;
}

/// Packs both tiles of a full k-step that is not contiguous along k: for each of 32 k, 32 adjacent elements.
/// `kNonTemporal` needs `kLeft`.
template <bool kLeft, bool kNonTemporal = false>
inline void pack_pair(const Bf16* src, int64_t ld, Bf16* dst) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const __m512i x = _mm512_loadu_si512(src + 2 * i * ld), y = _mm512_loadu_si512(src + (2 * i + 1) * ld);
    r[i] = _mm512_permutex2var_epi16(x, low, y);
    t[i] = _mm512_permutex2var_epi16(x, high, y);
    if constexpr (!kLeft) {
      _mm512_store_si512(dst + i * kKStep, r[i]);
      _mm512_store_si512(dst + kTileElems + i * kKStep, t[i]);
    }
  }
  if constexpr (!kLeft) return;
  const auto store_row = [](Bf16* to, __m512i v) {
    kNonTemporal ? _mm512_stream_si512(reinterpret_cast<__m512i*>(to), v) : _mm512_store_si512(to, v);
  };
  transpose16(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) store_row(dst + i * kKStep, r[i]);
  transpose16(t);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) store_row(dst + kTileElems + i * kKStep, t[i]);
}

/// Packs the panel at p.
template <bool kLeft, bool kAlongK>
void pack_panel(const Operand& m, int64_t p, int64_t k0, int steps, Bf16* dst) {
  for (int h = 0; h < 2; ++h) {
    const int64_t start = tile_start(m, p, h);
    const int rows = static_cast<int>(std::clamp<int64_t>(m.extent - start, 0, 16));
    const Bf16* src = m.at(start, k0);
    const int64_t next = kKStep * (kAlongK ? 1 : m.ld);
    Bf16* second_dst = m.second_dst ? m.second_dst + m.packed_offset(p / kBlockDim, k0) : nullptr;
    const auto tile = [&](int s, int count, int ks) {
      const int offset = (2 * s + h) * kTileElems;
      pack_tile<kLeft, kAlongK>(src + s * next, m.ld, count, ks, dst + offset,
                                second_dst ? second_dst + offset : nullptr);
    };
    int s = 0;
    if (rows == 16)
      for (; s < steps && k0 + (s + 1) * kKStep <= m.k; ++s) tile(s, 16, kKStep);
    for (; s < steps; ++s) tile(s, rows, static_cast<int>(std::clamp<int64_t>(m.k - k0 - s * kKStep, 0, kKStep)));
  }
}

/// Packs panels of an operand that is not contiguous along k, `kStripPanels` at a time: each k is another page, so that
/// reading several panels of it saves TLB misses. `stride`: elements between the packed panels.
template <bool kLeft>
void pack_strips(const Operand& m, int64_t p, int64_t panels, int64_t k0, int steps, Bf16* dst, int64_t stride) {
  const int64_t full_panels = m.half ? 0 : std::min(panels, (m.extent - p) / kBlockDim);
  const int full_steps = static_cast<int>(std::min<int64_t>(steps, (m.k - k0) / kKStep));
  for (int64_t first = 0; first < full_panels; first += kStripPanels)
    for (int s = 0; s < full_steps; ++s)
      for (int64_t i = first; i < std::min(full_panels, first + kStripPanels); ++i)
        pack_pair<kLeft>(m.at(p + i * kBlockDim, k0 + s * kKStep), m.ld,
                         dst + i * stride + int64_t{s} * 2 * kTileElems);
  for (int64_t i = 0; i < panels; ++i) {
    const int done = i < full_panels ? full_steps : 0;
    if (done < steps)
      pack_panel<kLeft, false>(m, p + i * kBlockDim, k0 + done * kKStep, steps - done,
                               dst + i * stride + int64_t{done} * 2 * kTileElems);
  }
}

/// Packs `panels` consecutive panels from p, `steps` k-steps from k0, to places `stride` elements apart; copies them if
/// the operand is packed.
inline void pack_panels(const Operand& m, int64_t p, int64_t panels, int64_t k0, int steps, Bf16* dst, int64_t stride) {
  if (m.packed) {
    for (int64_t i = 0; i < panels; ++i, dst += stride)
      std::memcpy(dst, m.packed_panel(p / kBlockDim + i, k0), sizeof(Bf16) * 2 * kTileElems * steps);
    return;
  }
  count_packed_bytes(panels * steps * 2 * kTileElems * 2);
  if (!m.k_contiguous)
    return m.left ? pack_strips<true>(m, p, panels, k0, steps, dst, stride)
                  : pack_strips<false>(m, p, panels, k0, steps, dst, stride);
  for (int64_t i = 0; i < panels; ++i, p += kBlockDim, dst += stride)
    m.left ? pack_panel<true, true>(m, p, k0, steps, dst) : pack_panel<false, true>(m, p, k0, steps, dst);
}
/// The same, one panel after the other.
inline void pack_panels(const Operand& m, int64_t p, int64_t panels, int64_t k0, int steps, Bf16* dst) {
  pack_panels(m, p, panels, k0, steps, dst, int64_t{steps} * 2 * kTileElems);
}

}  // namespace weft::kernels::CPU_CAPABILITY
