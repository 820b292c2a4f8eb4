#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "weft/kernels/gemm.h"

namespace weft::kernels {

/// Some rows of a product A B, which lie in memory of their own. Where `supports_blocked_layout` says so, `out` and
/// `addends` may be squares: [⌈N/32⌉, ⌈rows/32⌉, 32, 32], contiguous. Between ranks that is quicker than rows, each
/// line of which is on another page.
struct RowChunk {
  at::Tensor a = {};                     // [rows, K], K contiguous; or packed
  at::Tensor out = {};                   // [rows, N], where they go; undefined: to the result, from `row` on
  std::vector<at::Tensor> addends = {};  // [rows, N] each; added besides `Epilogue::addend`
  int64_t row = 0;  // the first of them among all rows: of the result and of all that the epilogue reads or keeps
  int64_t packed_rows = 0;   // if `a` is packed
  at::Tensor pack_dst = {};  // where `a` is packed to, on the way; undefined: nowhere
};
inline bool is_packed(const RowChunk& chunk) { return chunk.a.dim() == 4; }
inline int64_t row_count(const RowChunk& chunk) { return is_packed(chunk) ? chunk.packed_rows : chunk.a.size(0); }

/// A product whose rows become available, or are needed, piece by piece. The weight is read once for a block of rows,
/// so pieces are worked on together if they are there.
struct RowChunks {
  std::vector<RowChunk> list = {};  // in the order in which they are worked on
  int64_t rows = 0;                 // of the whole product
  int64_t min_block_rows = 64;      // rows to wait for before a block is started, if so many are left
  int64_t max_block_rows = 0;       // rows of a block; 0: as many as fit

  /// Called before rows from `from` on of chunk `chunk` are read, its `a` and its `addends`: returns how far they are
  /// there (at least `from` + 1), waiting if none is. May be asked again. Unset: all are.
  std::function<int64_t(int chunk, int64_t from)> ready = {};
  /// Rows below `to` of chunk `chunk` are in its `pack_dst`.
  std::function<void(int chunk, int64_t to)> on_packed = {};
  /// Rows below `to` of chunk `chunk` are final.
  std::function<void(int chunk, int64_t to)> on_done = {};
  /// Called about every ten microseconds.
  std::function<void()> progress = {};
};

/// Whether squares can be made, and packed rows be taken, by a product of matrices of `dtype` on the CPU, K long, N
/// wide.
bool supports_blocked_layout(at::ScalarType dtype, int64_t n, int64_t k);

/// Rows of A [rows, K] in the order in which the same products take them, packed once for many: a tensor
/// [⌈rows/32⌉, 2⌈K/32⌉, 16, 32], contiguous.
void pack_rows(const at::Tensor& a, const at::Tensor& to);

/// A B with its epilogue, piece by piece; B's values are looked at once. `ready`, `on_done` and `progress` are called
/// by the calling thread. `out` of the result is undefined if every piece has its own.
GemmResult gemm(const RowChunks& a, const Matrix& b, const Epilogue& epilogue = {});

}  // namespace weft::kernels
