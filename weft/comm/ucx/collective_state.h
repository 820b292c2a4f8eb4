#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "weft/comm/ucx/wire.h"
#include "weft/comm/ucx/worker.h"

namespace weft::comm::ucx {

/// One round as this rank sees it: a header to and from each peer, then the segments of the blocks. Data of a peer is
/// received only after its header was found equal. Keeps its memory for the next round.
class CollectiveState {
 public:
  /// Sends the headers. `local` is the block for everyone, or undefined: then there is one block for each rank.
  void start(Worker& worker, int rank, int size, const Header& header, const at::Tensor& local);
  /// Compares headers that have come, receives what may be received by now, and tells what is wrong.
  std::optional<Failure> progress();
  /// Rows [0, rows) of the block for `to` are final.
  void mark_ready(int to, int64_t rows);

  bool open() const { return open_; }
  const Header& header() const { return header_; }
  int64_t ready_rows(int to) const { return peer_states_[to].ready_rows; }
  const at::Tensor& outgoing(int to) const { return peer_states_[to].outgoing; }
  const at::Tensor& incoming(int from) const { return peer_states_[from].incoming; }
  /// How many rows of the block of `from` are there, without a gap.
  int64_t arrived(int from) const;
  /// Headers are exchanged and equal, the peer's block is here, and ours needs no more help.
  bool completed(int peer) const;
  /// Forgets blocks that were the caller's.
  void close();
  /// Takes back what it still expects.
  void cancel();
  /// What went wrong with `peer`.
  Failure failure(FailureReason reason, int peer) const;

 private:
  struct PeerState {
    Header remote{};
    Transfer header_out, header_in;
    bool matched = false;
    at::Tensor outgoing, incoming;
    int64_t ready_rows = 0;
    size_t posted = 0, sent = 0, received = 0;  // segments: given to UCX, through, there without a gap
    std::vector<Transfer> sends, receives;
  };
  void allocate_blocks(at::ScalarType dtype, const at::Tensor& local);
  void send_segments(int to);
  void receive_segments(int from);

  Worker* worker_ = nullptr;
  int rank_ = 0;
  bool open_ = false;
  Header header_{};
  int64_t row_bytes_ = 0;
  std::vector<int64_t> segment_ends_;  // of the segments, in rows
  std::vector<PeerState> peer_states_;
  at::Tensor memory_;  // grows
};

}  // namespace weft::comm::ucx
