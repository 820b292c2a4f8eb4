#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "weft/kernels/gemm.h"

namespace weft::kernels {

/// A row chunk of A B, with its own input and optionally its own output. If `supports_blocked_layout`, `out` and
/// `addends` may use the blocked layout: contiguous [⌈N/32⌉, ⌈rows/32⌉, 32, 32]. It needs fewer TLB entries than rows,
/// each of which lies on another page.
struct RowChunk {
  at::Tensor a = {};                     // [rows, K] with contiguous rows, or packed by `pack_rows`
  at::Tensor out = {};                   // [rows, N]; undefined: rows `row` and up of the result
  std::vector<at::Tensor> addends = {};  // [rows, N] each; added on top of `Epilogue::addend`
  int64_t row = 0;                       // first row of the chunk in the result and in all tensors of the epilogue
  int64_t packed_rows = 0;               // number of rows, if `a` is packed
  at::Tensor pack_dst = {};              // second destination of the packed `a`; may be undefined
};
inline bool is_packed(const RowChunk& chunk) { return chunk.a.dim() == 4; }
inline int64_t row_count(const RowChunk& chunk) { return is_packed(chunk) ? chunk.packed_rows : chunk.a.size(0); }

/// The left operand of a GEMM whose rows arrive, or are needed, in chunks. Ready chunks are multiplied together in one
/// block, because each block reads the whole weight.
struct RowChunks {
  std::vector<RowChunk> list = {};  // in processing order
  int64_t rows = 0;                 // of the whole GEMM
  int64_t min_block_rows = 64;      // rows to wait for before starting a block, if that many are left
  int64_t max_block_rows = 0;       // rows of a block; 0: as many as fit

  /// Called before `a` and `addends` of chunk `chunk` are read from row `from` on. Blocks until at least one of these
  /// rows is ready and returns the end of the ready rows (> from). May be called again for the same rows. Unset: all
  /// rows are ready.
  std::function<int64_t(int chunk, int64_t from)> ready = {};
  /// Called when rows [0, to) of chunk `chunk` are in its `pack_dst`.
  std::function<void(int chunk, int64_t to)> on_packed = {};
  /// Called when rows [0, to) of the output of chunk `chunk` are final.
  std::function<void(int chunk, int64_t to)> on_done = {};
  /// Called about every 10 µs in the AMX tier, after each block in the others.
  std::function<void()> progress = {};
};

/// Whether a GEMM with B [K, N] of `dtype` on the CPU takes packed rows and writes the blocked layout.
bool supports_blocked_layout(at::ScalarType dtype, int64_t n, int64_t k);

/// Packs A [rows, K] into tiles, as `RowChunk::a` takes them, so that several GEMMs can share the packed copy. `to` is
/// contiguous [⌈rows/32⌉, 2⌈K/32⌉, 16, 32].
void pack_rows(const at::Tensor& a, const at::Tensor& to);

/// Computes A B with its epilogue, chunk by chunk. Callbacks run on the calling thread. The `out` of the result is
/// undefined if every chunk has its own.
GemmResult gemm(const RowChunks& a, const Matrix& b, const Epilogue& epilogue = {});

}  // namespace weft::kernels
