#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "weft/kernels/gemm.h"

namespace weft::kernels {

/// Some rows of a product A B, which lie in memory of their own. Where `in_squares` says so, `out` and `add` may be
/// squares: [⌈N/32⌉, ⌈rows/32⌉, 32, 32], contiguous. Between ranks that is quicker than rows, each line of which is on
/// another page.
struct Piece {
  at::Tensor a = {};                 // [rows, K], K contiguous; or packed
  at::Tensor out = {};               // [rows, N], where they go; undefined: to the result, from `row` on
  std::vector<at::Tensor> add = {};  // [rows, N] each; added besides `Epilogue::add`
  int64_t row = 0;  // the first of them among all rows: of the result and of all that the epilogue reads or keeps
  int64_t packed_rows = 0;  // if `a` is packed
  at::Tensor tiles = {};    // where `a` is packed to, on the way; undefined: nowhere
};
inline bool is_packed(const Piece& piece) { return piece.a.dim() == 4; }
inline int64_t rows_in(const Piece& piece) { return is_packed(piece) ? piece.packed_rows : piece.a.size(0); }

/// A product whose rows become available, or are needed, piece by piece. The weight is read once for a block of rows,
/// so pieces are worked on together if they are there.
struct Pieces {
  std::vector<Piece> list = {};  // in the order in which they are worked on
  int64_t rows = 0;              // of the whole product
  int64_t least = 64;            // rows to wait for before a block is started, if so many are left
  int64_t most = 0;              // rows of a block; 0: as many as fit

  /// Called before rows from `from` on of piece `piece` are read, its `a` and its `add`: returns how far they are
  /// there (at least `from` + 1), waiting if none is. May be asked again. Unset: all are.
  std::function<int64_t(int piece, int64_t from)> ready = {};
  /// Rows below `to` of piece `piece` are in its `tiles`.
  std::function<void(int piece, int64_t to)> packed = {};
  /// Rows below `to` of piece `piece` are final.
  std::function<void(int piece, int64_t to)> done = {};
  /// Called about every ten microseconds.
  std::function<void()> between = {};
};

/// Whether squares can be made, and packed rows be taken, by a product of matrices of `dtype` on the CPU, K long, N
/// wide.
bool in_squares(at::ScalarType dtype, int64_t n, int64_t k);

/// Rows of A [rows, K] in the order in which the same products take them, packed once for many: a tensor
/// [⌈rows/32⌉, 2⌈K/32⌉, 16, 32], contiguous.
void pack_rows(const at::Tensor& a, const at::Tensor& to);

/// A B with its epilogue, piece by piece; B's values are looked at once. `ready`, `done` and `between` are called by
/// the calling thread. `out` of the result is undefined if every piece has its own.
GemmResult gemm(const Pieces& a, const Matrix& b, const Epilogue& epilogue = {});

}  // namespace weft::kernels
