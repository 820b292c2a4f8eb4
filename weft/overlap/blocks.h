#pragma once
#include <c10/util/accumulate.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "weft/comm/transport.h"

namespace weft::overlap {

/// The other ranks, the next one first.
inline std::vector<int> peers(const comm::Transport& transport) {
  std::vector<int> list;
  for (int i = 1; i < transport.size(); ++i) list.push_back((transport.rank() + i) % transport.size());
  return list;
}

/// x with rows that have no gaps.
inline at::Tensor with_contiguous_rows(const at::Tensor& x) {
  return x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous();
}

/// How many rows of every peer's block are there; waits for row `from` if it is not.
inline int64_t arrived_from_all(comm::InFlightCollective& collective, const std::vector<int>& peers, int64_t from,
                                int64_t rows) {
  int64_t least = rows;
  for (const int peer : peers) {
    auto ready = collective.arrived(peer);
    if (ready <= from) {
      collective.wait(peer, from + 1);
      ready = std::max(from + 1, collective.arrived(peer));
    }
    least = std::min(least, ready);
  }
  return least;
}

/// Blocks of 32 x 32 values hold some beyond the rows and columns that count. The ranks agree on the rows as they are,
/// and on this number of columns: it leaves room for `values` and differs wherever `columns` does. Without rows there
/// are no values.
inline int64_t wire_columns(int64_t values, int64_t rows, int64_t columns) {
  return rows == 0 ? columns : (values + rows - 1) / rows + columns % 32;
}

/// The first values of a block, in another shape.
inline at::Tensor reshaped(const at::Tensor& block, at::IntArrayRef sizes) {
  return block.view({block.numel()}).narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
}

/// A round of blocks [rows, columns] that are summed. They travel as rows or as squares of 32 x 32
/// (kernels/row_chunks.h).
class BlockedReduceScatter {
 public:
  BlockedReduceScatter(comm::Transport& transport, int64_t rows, int64_t columns, at::ScalarType dtype, bool blocked)
      : rows_(rows),
        block_sizes_(blocked ? std::vector<int64_t>{(columns + 31) / 32, (rows + 31) / 32, 32, 32}
                             : std::vector<int64_t>{}) {
    const auto sent_columns = blocked ? wire_columns(c10::multiply_integers(block_sizes_), rows, columns) : columns;
    collective_ = transport.reduce_scatter(rows, sent_columns, dtype);
  }

  at::Tensor outgoing(int to) { return shaped(collective_->outgoing(to)); }
  at::Tensor incoming(int from) { return shaped(collective_->incoming(from)); }
  /// Rows [0, rows) of the block for `to` are final.
  void mark_ready(int to, int64_t rows) { collective_->mark_ready(to, rows); }
  /// How many rows of every peer's block are there; waits for row `from` if it is not.
  int64_t arrived_from_all(const std::vector<int>& peers, int64_t from) {
    return overlap::arrived_from_all(*collective_, peers, from, rows_);
  }
  void wait(int from) { collective_->wait(from, rows_); }
  void progress() { collective_->progress(); }
  void finish() { collective_->finish(); }

 private:
  at::Tensor shaped(const at::Tensor& block) const {
    return block_sizes_.empty() ? block : reshaped(block, block_sizes_);
  }

  int64_t rows_;                      // of a block
  std::vector<int64_t> block_sizes_;  // sizes; empty: rows
  std::unique_ptr<comm::InFlightCollective> collective_;
};

}  // namespace weft::overlap
