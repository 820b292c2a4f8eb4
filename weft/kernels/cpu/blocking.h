#pragma once
#include <algorithm>
#include <cstdint>

// Sizes of tiles and blocks of the AMX GEMM.

namespace weft::kernels {

constexpr int kTileElems = 512;    // bfloat16 elements of a tile: 16 rows of 32
constexpr int kKStep = 32;         // elements of K that one tile multiplication reduces
constexpr int kBlockDim = 32;      // rows and columns of an accumulator block of 2 × 2 tiles
constexpr int kBlockElems = 1024;  // float32 elements of an accumulator block: four 16 × 16 tiles

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/// The panels of `extent` rows or columns.
inline int64_t panels_of(int64_t extent) { return ceil_div(extent, kBlockDim); }

/// [begin, end), of panels or k-steps.
struct Range {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
};
/// Part `i` of [0, count) in `parts` parts.
inline Range share_of(int64_t count, int64_t i, int64_t parts) { return {count * i / parts, count * (i + 1) / parts}; }

/// The blocking of a GEMM. The streamed operand is read one panel at a time; the head of the panel stays in L1. The
/// resident operand is packed into blocks of panels that stay in L2, and each streamed panel is multiplied by the whole
/// block. A reduction longer than `kc_steps` is split into K-blocks, whose partial sums are kept in
/// `Scratch::partial_sums`.
struct Blocking {
  int kc_steps;      // k-steps of a K-block
  int k_blocks;      // K-blocks of the reduction
  int k_steps;       // k-steps of the reduction
  int64_t resident;  // panels in a resident block
  int64_t streamed;  // panels whose partial sums are kept across K-blocks: even, unless it is all panels
  bool full_k;       // pack a resident block over all of K at once, if it fits and is needed several times
};

constexpr int64_t kResidentBytes = 1 << 20;     // half of L2
constexpr int64_t kPartialSumsBytes = 1 << 20;  // the other half, with several K-blocks
constexpr int kMaxKcSteps = 36;                 // k-steps of a K-block: 1152 elements
/// Pairs of accumulator blocks (a and b of a gated GEMM) that fit into `kPartialSumsBytes`.
constexpr int64_t kMaxGatedPairs = kPartialSumsBytes / (2 * kBlockElems * 4);

/// The smallest block size that splits `all` panels into no more blocks than `cap` does.
inline int64_t balanced_block_size(int64_t all, int64_t cap) { return ceil_div(all, ceil_div(all, cap)); }

/// `cap`: maximum number of resident panels in a block, besides the limit that L2 sets.
inline Blocking choose_blocking(int64_t streamed, int64_t resident, int64_t k, int64_t cap = INT64_MAX) {
  const int64_t steps = ceil_div(k, kKStep);
  Blocking b{};
  b.k_blocks = static_cast<int>(std::max<int64_t>(1, ceil_div(steps, kMaxKcSteps)));
  b.kc_steps = static_cast<int>(ceil_div(steps, b.k_blocks));
  b.k_steps = static_cast<int>(steps);
  const int64_t panel_bytes = static_cast<int64_t>(std::max(b.kc_steps, 1)) * 2 * kTileElems * 2;
  const int64_t fit = kResidentBytes / panel_bytes / (b.k_blocks > 1 ? 2 : 1);
  b.resident = balanced_block_size(std::max<int64_t>(resident, 1), std::max<int64_t>(std::min(fit, cap), 1));
  b.streamed = b.k_blocks == 1
                   ? streamed
                   : std::clamp<int64_t>(kPartialSumsBytes / (b.resident * kBlockElems * 4) / 2 * 2, 1, streamed);
  b.full_k = b.k_blocks == 1 || (b.streamed < streamed && b.resident * steps * 2 * kTileElems * 2 <= kResidentBytes);
  return b;
}

}  // namespace weft::kernels
