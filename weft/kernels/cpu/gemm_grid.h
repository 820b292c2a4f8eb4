#pragma once
#include <cstdint>

// How the AMX GEMM is split over threads: by a model of the work of each thread and of the bytes that it brings into
// its L2.

namespace weft::kernels {

/// A GEMM in panels of 32 rows or columns and k-steps of 32 elements. The streamed operand is multiplied by blocks of
/// panels of the resident one.
struct GemmWork {
  int64_t resident_panels = 0, streamed_panels = 0, k_steps = 0;
  int64_t panels_per_unit = 1;  // streamed panels that one thread must multiply together
  int64_t block_panels = 1;     // panels of a resident block
  bool splits_k = false;        // whether the sums of parts of K can be added up later
};

/// A GEMM [m, k] × [k, n]; that of a weight gradient streams its left operand. Without limits from its epilogue.
GemmWork dense_gemm_work(int64_t m, int64_t n, int64_t k, bool weight_gradient);

/// Threads along the resident panels, the streamed panels and K.
struct GemmGrid {
  int resident = 1, streamed = 1, k = 1;

  int threads() const { return resident * streamed * k; }
  bool operator==(const GemmGrid&) const = default;

  struct Cell {
    int resident, streamed, k;
  };
  Cell cell(int thread) const { return {thread / k / streamed, thread / k % streamed, thread % k}; }
};

/// The work of the thread with the largest share.
struct LargestShare {
  int64_t block_steps = 0;   // multiplications of a 32 × 32 block over one k-step
  int64_t packed_bytes = 0;  // that it packs
  int64_t moved_bytes = 0;   // that it brings into its L2: packed panels, and partial sums of parts of K

  double cycles() const;
};
LargestShare largest_share(const GemmWork& work, const GemmGrid& grid);

/// The multiplications of the largest share / those of an equal share for each of `threads`.
double imbalance(const GemmWork& work, const GemmGrid& grid, int threads);

/// The grid of at most `threads` threads with the fewest cycles of the largest share.
GemmGrid choose_grid(const GemmWork& work, int threads);

/// Bytes packed by AMX kernels, those of attention too, since the start of the process.
int64_t gemm_packed_bytes();
void count_packed_bytes(int64_t bytes);

}  // namespace weft::kernels
