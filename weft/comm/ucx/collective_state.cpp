#include "weft/comm/ucx/collective_state.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <utility>

namespace weft::comm::ucx {
namespace {

int64_t start_of(const std::vector<int64_t>& ends, size_t segment) { return segment == 0 ? 0 : ends[segment - 1]; }

char* row(const at::Tensor& block, int64_t index, int64_t row_bytes) {
  return static_cast<char*>(block.data_ptr()) + index * row_bytes;
}

const Transfer* transfer_at(const std::vector<Transfer>& transfers, size_t i) {
  return i < transfers.size() ? &transfers[i] : nullptr;
}

/// Advances `first_pending` past completed transfers.
void skip_done(const std::vector<Transfer>& transfers, size_t posted, size_t& first_pending) {
  while (first_pending < posted && transfers[first_pending].done()) ++first_pending;
}

}  // namespace

void CollectiveState::start(Worker& worker, int rank, int size, const Header& header, const at::Tensor& local) {
  worker_ = &worker;
  rank_ = rank;
  open_ = true;
  header_ = header;
  peer_states_.resize(size);
  const auto dtype = static_cast<at::ScalarType>(header.dtype);
  row_bytes_ = header.columns * static_cast<int64_t>(c10::elementSize(dtype));
  segment_ends_ = segment_ends(header.rows, row_bytes_);
  allocate_blocks(dtype, local);
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    auto& state = peer_states_[peer];
    state.sends.assign(segment_ends_.size(), {});
    state.receives.assign(segment_ends_.size(), {});
    worker.receive(header_tag(header.token, header.seq, peer), &state.remote, sizeof(Header), state.header_in);
    worker.send(peer, header_tag(header.token, header.seq, rank), &header_, sizeof(Header), state.header_out);
  }
}

/// Carves the blocks out of `memory_`: one incoming block per peer and, without `local`, one outgoing block per rank.
/// The incoming block of this rank is its own outgoing block.
void CollectiveState::allocate_blocks(at::ScalarType dtype, const at::Tensor& local) {
  constexpr int64_t kAlign = 64;
  const int64_t bytes = (header_.rows * row_bytes_ + kAlign - 1) / kAlign * kAlign;
  const int64_t needed = bytes * static_cast<int64_t>(peer_states_.size()) * (local.defined() ? 1 : 2);
  const int64_t capacity = memory_.defined() ? memory_.numel() : 0;
  if (needed > capacity) memory_ = at::empty({std::max(needed, 2 * capacity)}, at::kByte);
  int64_t used = 0;
  const auto carve = [&] {
    const int64_t offset = std::exchange(used, used + bytes) / static_cast<int64_t>(c10::elementSize(dtype));
    if (!memory_.defined()) return at::empty({header_.rows, header_.columns}, dtype);  // 0 bytes
    return at::empty({0}, dtype).set_(memory_.storage(), offset, {header_.rows, header_.columns}, {header_.columns, 1});
  };
  for (int r = 0; r < static_cast<int>(peer_states_.size()); ++r) {
    auto& state = peer_states_[r];
    state.outgoing = local.defined() ? local : carve();
    state.incoming = r == rank_ ? state.outgoing : carve();
    state.matched = false;
    state.ready_rows = 0;
    state.posted = state.sent = state.received = 0;
  }
}

void CollectiveState::mark_ready(int to, int64_t rows) {
  peer_states_[to].ready_rows = rows;
  if (to != rank_) send_segments(to);
}

void CollectiveState::send_segments(int to) {
  auto& state = peer_states_[to];
  while (state.posted < segment_ends_.size() && segment_ends_[state.posted] <= state.ready_rows) {
    const size_t i = state.posted++;
    const int64_t first = start_of(segment_ends_, i);
    worker_->send(to, segment_tag(header_.token, header_.seq, rank_, i), row(state.outgoing, first, row_bytes_),
                  (segment_ends_[i] - first) * row_bytes_, state.sends[i]);
  }
}

void CollectiveState::receive_segments(int from) {
  auto& state = peer_states_[from];
  for (size_t i = 0; i < segment_ends_.size(); ++i) {
    const int64_t first = start_of(segment_ends_, i);
    worker_->receive(segment_tag(header_.token, header_.seq, from, i), row(state.incoming, first, row_bytes_),
                     (segment_ends_[i] - first) * row_bytes_, state.receives[i]);
  }
}

std::optional<Failure> CollectiveState::progress() {
  for (int peer = 0; peer < static_cast<int>(peer_states_.size()); ++peer) {
    if (peer == rank_) continue;
    auto& state = peer_states_[peer];
    if (!state.matched && state.header_in.done()) {
      if (state.remote != header_)
        return failure(state.remote.token == header_.token ? FailureReason::mismatch : FailureReason::protocol_error,
                       peer);
      state.matched = true;
      receive_segments(peer);
    }
    skip_done(state.sends, state.posted, state.sent);
    if (state.matched) skip_done(state.receives, segment_ends_.size(), state.received);
    const std::array<const Transfer*, 4> next = {&state.header_in, &state.header_out,
                                                 transfer_at(state.sends, state.sent),
                                                 transfer_at(state.receives, state.received)};
    for (const auto* transfer : next) {
      if (transfer && transfer->failed())
        return failure(transfer->status == UCS_ERR_MESSAGE_TRUNCATED ? FailureReason::protocol_error
                                                                     : FailureReason::connection_lost,
                       peer);
    }
  }
  return {};
}

Failure CollectiveState::failure(FailureReason reason, int peer) const {
  return {.reason = reason,
          .reporter = rank_,
          .peer = peer,
          .seq = header_.seq,
          .local = fingerprint(header_),
          .remote = fingerprint(peer_states_[peer].remote)};
}

int64_t CollectiveState::arrived(int from) const {
  const auto& state = peer_states_[from];
  if (from == rank_) return state.ready_rows;
  return state.received == segment_ends_.size() && state.matched ? header_.rows
                                                                 : start_of(segment_ends_, state.received);
}

bool CollectiveState::completed(int peer) const {
  const auto& state = peer_states_[peer];
  return peer == rank_ || (state.matched && state.header_out.done() && state.received == segment_ends_.size() &&
                           state.sent == segment_ends_.size());
}

void CollectiveState::close() {
  open_ = false;
  for (auto& state : peer_states_) state.outgoing = state.incoming = at::Tensor();
}

void CollectiveState::cancel() {
  for (auto& state : peer_states_) {
    for (auto& transfer : state.receives) worker_->cancel_receive(transfer);
    worker_->cancel_receive(state.header_in);
  }
}

}  // namespace weft::comm::ucx
