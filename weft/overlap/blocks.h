#pragma once
#include <c10/util/accumulate.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "weft/comm/transport.h"

namespace weft::overlap {

/// The other ranks, starting with rank + 1.
inline std::vector<int> peers(const comm::Transport& transport) {
  std::vector<int> list;
  for (int i = 1; i < transport.size(); ++i) list.push_back((transport.rank() + i) % transport.size());
  return list;
}

/// x, or a contiguous copy if its rows are strided.
inline at::Tensor with_contiguous_rows(const at::Tensor& x) {
  return x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous();
}

/// Number of rows that have arrived from every peer. Waits until it is greater than `from`.
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

/// Number of columns to announce for a block in the 32x32 blocked layout, which pads rows and columns: the announced
/// [rows, columns] holds the `values` of the padded block, and differs whenever `columns` differs.
inline int64_t wire_columns(int64_t values, int64_t rows, int64_t columns) {
  return rows == 0 ? columns : (values + rows - 1) / rows + columns % 32;
}

/// The first values of a block, viewed with other sizes.
inline at::Tensor reshaped(const at::Tensor& block, at::IntArrayRef sizes) {
  return block.view({block.numel()}).narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
}

/// A reduce-scatter of blocks [rows, columns], sent as rows or in the 32x32 blocked layout (kernels/row_chunks.h).
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
  /// Number of rows that have arrived from every peer. Waits until it is greater than `from`.
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
  std::vector<int64_t> block_sizes_;  // of the blocked layout; empty: sent as rows
  std::unique_ptr<comm::InFlightCollective> collective_;
};

}  // namespace weft::overlap
