#pragma once
#include <c10/util/accumulate.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "weft/comm/exchange.h"

namespace weft::overlap {

/// The other ranks, the next one first.
inline std::vector<int> peers(const comm::Link& link) {
  std::vector<int> list;
  for (int i = 1; i < link.size(); ++i) list.push_back((link.rank() + i) % link.size());
  return list;
}

/// x with rows that have no gaps.
inline at::Tensor whole_rows(const at::Tensor& x) { return x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous(); }

/// How many rows of every peer's block are there; waits for row `from` if it is not.
inline int64_t arrived_from_all(comm::Exchange& round, const std::vector<int>& peers, int64_t from, int64_t rows) {
  int64_t least = rows;
  for (const int peer : peers) {
    auto there = round.arrived(peer);
    if (there <= from) {
      round.wait(peer, from + 1);
      there = std::max(from + 1, round.arrived(peer));
    }
    least = std::min(least, there);
  }
  return least;
}

/// Blocks of 32 x 32 values hold some beyond the rows and columns that count. The ranks agree on the rows as they are,
/// and on this number of columns: it leaves room for `values` and differs wherever `columns` does. Without rows there
/// are no values.
inline int64_t columns_for(int64_t values, int64_t rows, int64_t columns) {
  return rows == 0 ? columns : (values + rows - 1) / rows + columns % 32;
}

/// The first values of a block, in another shape.
inline at::Tensor reshaped(const at::Tensor& block, at::IntArrayRef sizes) {
  return block.view({block.numel()}).narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
}

/// A round of blocks [rows, columns] that are summed. They travel as rows or as squares of 32 x 32 (kernels/row_chunks.h).
class SumRound {
 public:
  SumRound(comm::Link& link, int64_t rows, int64_t columns, at::ScalarType dtype, bool squares)
      : rows_(rows),
        squares_(squares ? std::vector<int64_t>{(columns + 31) / 32, (rows + 31) / 32, 32, 32}
                         : std::vector<int64_t>{}) {
    const auto agreed = squares ? columns_for(c10::multiply_integers(squares_), rows, columns) : columns;
    round_ = link.reduce_scatter(rows, agreed, dtype);
  }

  at::Tensor outgoing(int to) { return shaped(round_->outgoing(to)); }
  at::Tensor incoming(int from) { return shaped(round_->incoming(from)); }
  /// Rows [0, rows) of the block for `to` are final.
  void publish(int to, int64_t rows) { round_->publish(to, rows); }
  /// How many rows of every peer's block are there; waits for row `from` if it is not.
  int64_t arrived_from_all(const std::vector<int>& peers, int64_t from) {
    return overlap::arrived_from_all(*round_, peers, from, rows_);
  }
  void wait(int from) { round_->wait(from, rows_); }
  void advance() { round_->advance(); }
  void finish() { round_->finish(); }

 private:
  at::Tensor shaped(const at::Tensor& block) const { return squares_.empty() ? block : reshaped(block, squares_); }

  int64_t rows_;                  // of a block
  std::vector<int64_t> squares_;  // sizes; empty: rows
  std::unique_ptr<comm::Exchange> round_;
};

}  // namespace weft::overlap
