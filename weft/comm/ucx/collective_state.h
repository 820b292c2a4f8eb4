#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "weft/comm/ucx/wire.h"
#include "weft/comm/ucx/worker.h"

namespace weft::comm::ucx {

/// State of one collective on this rank. Exchanges a header with each peer, then the segments of the blocks. Receives
/// data from a peer only if its header is equal. Keeps its memory for the next collective.
class CollectiveState {
 public:
  /// Sends the headers. `local` is the block for all ranks; if undefined, there is one block per rank.
  void start(Worker& worker, int rank, int size, const Header& header, const at::Tensor& local);
  /// Compares headers that have arrived and posts the receives of matching peers. Returns a failure, if any.
  std::optional<Failure> progress();
  /// Rows [0, rows) of the block for `to` are final.
  void mark_ready(int to, int64_t rows);

  bool open() const { return open_; }
  const Header& header() const { return header_; }
  int64_t ready_rows(int to) const { return peer_states_[to].ready_rows; }
  const at::Tensor& outgoing(int to) const { return peer_states_[to].outgoing; }
  const at::Tensor& incoming(int from) const { return peer_states_[from].incoming; }
  /// Number of leading rows of the block of `from` that have arrived.
  int64_t arrived(int from) const;
  /// The headers match, the peer's block has arrived, and the sends to the peer are complete.
  bool completed(int peer) const;
  /// Releases the blocks and marks the collective as finished.
  void close();
  /// Cancels pending receives.
  void cancel();
  /// A failure of this collective caused by `peer`.
  Failure failure(FailureReason reason, int peer) const;

 private:
  struct PeerState {
    Header remote{};
    Transfer header_out, header_in;
    bool matched = false;
    at::Tensor outgoing, incoming;
    int64_t ready_rows = 0;
    size_t posted = 0, sent = 0, received = 0;  // leading segments: posted to UCX, sent, received
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
  std::vector<int64_t> segment_ends_;  // in rows
  std::vector<PeerState> peer_states_;
  at::Tensor memory_;  // of all blocks; only grows
};

}  // namespace weft::comm::ucx
