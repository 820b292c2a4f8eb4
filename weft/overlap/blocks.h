#pragma once
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "weft/comm/transport.h"
#include "weft/kernels/row_chunks.h"

namespace weft::overlap {

/// The other ranks, starting with rank + 1.
inline std::vector<int> peers(const comm::Transport& transport) {
  std::vector<int> list;
  for (int i = 1; i < transport.size(); ++i) list.push_back((transport.rank() + i) % transport.size());
  return list;
}

/// x, or a contiguous copy if the elements of a row are not adjacent.
inline at::Tensor with_contiguous_rows(const at::Tensor& x) {
  return x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous();
}

/// Number of rows that have arrived from every peer. Waits until it is greater than `from`.
inline int64_t arrived_from_all(comm::InFlightCollective& collective, const std::vector<int>& peers, int64_t from,
                                int64_t rows) {
  int64_t least = rows;
  for (const int peer : peers) {
    auto arrived = collective.arrived(peer);
    if (arrived <= from) {
      collective.wait(peer, from + 1);
      arrived = std::max(from + 1, collective.arrived(peer));
    }
    least = std::min(least, arrived);
  }
  return least;
}

/// Waits for the blocks of all peers and concatenates them with `local`, this rank's block, in rank order.
inline at::Tensor concatenate_blocks(const comm::Transport& transport, comm::InFlightCollective& collective,
                                     const at::Tensor& local) {
  const int64_t rows = local.size(0);
  auto all = at::empty({rows * transport.size(), local.size(1)}, local.options());
  const auto rows_of = [&](int rank) { return all.narrow(0, rank * rows, rows); };
  rows_of(transport.rank()).copy_(local);
  for (const int peer : peers(transport)) {
    collective.wait(peer, rows);
    rows_of(peer).copy_(collective.incoming(peer));
  }
  return all;
}

/// Row chunks of a GEMM whose result is reduce-scattered: the blocks of the peers, which it writes to `collective` and
/// marks ready, then this rank's block, which it writes to `own`.
template <class Collective>
kernels::RowChunks reduce_scatter_chunks(const comm::Transport& transport, Collective& collective, const at::Tensor& x,
                                         const at::Tensor& own) {
  const int64_t rows = own.size(0);
  kernels::RowChunks chunks{.rows = x.size(0)};
  const auto add = [&](int rank, const at::Tensor& out) {
    chunks.list.push_back({.a = x.narrow(0, rank * rows, rows), .out = out, .row = rank * rows});
  };
  for (const int peer : peers(transport)) add(peer, collective.outgoing(peer));
  add(transport.rank(), own);
  chunks.on_done = [&collective, peers = peers(transport)](int chunk, int64_t to) {
    if (chunk < static_cast<int>(peers.size())) collective.mark_ready(peers[chunk], to);
  };
  if (!transport.zero_copy()) chunks.progress = [&collective] { collective.progress(); };
  return chunks;
}

/// Number of columns in the fingerprint of a block [rows, columns] that is sent in the 32x32 blocked layout, which pads
/// it to `values` elements. [rows, wire_columns] has space for them, and different `columns` give different results, so
/// that a mismatch between ranks is detected.
inline int64_t wire_columns(int64_t values, int64_t rows, int64_t columns) {
  return rows == 0 ? columns : (values + rows - 1) / rows + columns % 32;
}

/// The first elements of a block, viewed with other sizes.
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
