#include "weft/comm/ucx/round.h"

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

const Transfer* at(const std::vector<Transfer>& transfers, size_t i) {
  return i < transfers.size() ? &transfers[i] : nullptr;
}

/// Moves `through` past what is done.
void pass(const std::vector<Transfer>& transfers, size_t posted, size_t& through) {
  while (through < posted && transfers[through].done()) ++through;
}

}  // namespace

void Round::start(Worker& worker, int rank, int size, const Header& header, const at::Tensor& mine) {
  worker_ = &worker;
  rank_ = rank;
  open_ = true;
  header_ = header;
  lanes_.resize(size);
  const auto dtype = static_cast<at::ScalarType>(header.dtype);
  row_bytes_ = header.columns * static_cast<int64_t>(c10::elementSize(dtype));
  ends_ = segment_ends(header.rows, row_bytes_);
  lay_out(dtype, mine);
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    auto& lane = lanes_[peer];
    lane.sends.assign(ends_.size(), {});
    lane.receives.assign(ends_.size(), {});
    worker.receive(header_tag(header.token, header.epoch, peer), &lane.theirs, sizeof(Header), lane.header_in);
    worker.send(peer, header_tag(header.token, header.epoch, rank), &header_, sizeof(Header), lane.header_out);
  }
}

/// Cuts the blocks from `memory_`: one for each peer's, and without `mine` one for each rank's own. What comes from
/// this rank itself is its own block.
void Round::lay_out(at::ScalarType dtype, const at::Tensor& mine) {
  constexpr int64_t kAlign = 64;
  const int64_t bytes = (header_.rows * row_bytes_ + kAlign - 1) / kAlign * kAlign;
  const int64_t wanted = bytes * static_cast<int64_t>(lanes_.size()) * (mine.defined() ? 1 : 2);
  const int64_t have = memory_.defined() ? memory_.numel() : 0;
  if (wanted > have) memory_ = at::empty({std::max(wanted, 2 * have)}, at::kByte);
  int64_t used = 0;
  const auto cut = [&] {
    const int64_t offset = std::exchange(used, used + bytes) / static_cast<int64_t>(c10::elementSize(dtype));
    if (!memory_.defined()) return at::empty({header_.rows, header_.columns}, dtype);  // of no bytes
    return at::empty({0}, dtype).set_(memory_.storage(), offset, {header_.rows, header_.columns}, {header_.columns, 1});
  };
  for (int r = 0; r < static_cast<int>(lanes_.size()); ++r) {
    auto& lane = lanes_[r];
    lane.outgoing = mine.defined() ? mine : cut();
    lane.incoming = r == rank_ ? lane.outgoing : cut();
    lane.agreed = false;
    lane.published = 0;
    lane.posted = lane.sent = lane.received = 0;
  }
}

void Round::publish(int to, int64_t rows) {
  lanes_[to].published = rows;
  if (to != rank_) send_segments(to);
}

void Round::send_segments(int to) {
  auto& lane = lanes_[to];
  while (lane.posted < ends_.size() && ends_[lane.posted] <= lane.published) {
    const size_t i = lane.posted++;
    const int64_t first = start_of(ends_, i);
    worker_->send(to, segment_tag(header_.token, header_.epoch, rank_, i), row(lane.outgoing, first, row_bytes_),
                  (ends_[i] - first) * row_bytes_, lane.sends[i]);
  }
}

void Round::receive_segments(int from) {
  auto& lane = lanes_[from];
  for (size_t i = 0; i < ends_.size(); ++i) {
    const int64_t first = start_of(ends_, i);
    worker_->receive(segment_tag(header_.token, header_.epoch, from, i), row(lane.incoming, first, row_bytes_),
                     (ends_[i] - first) * row_bytes_, lane.receives[i]);
  }
}

std::optional<Failure> Round::pump() {
  for (int peer = 0; peer < static_cast<int>(lanes_.size()); ++peer) {
    if (peer == rank_) continue;
    auto& lane = lanes_[peer];
    if (!lane.agreed && lane.header_in.done()) {
      if (lane.theirs != header_)
        return failure(lane.theirs.token == header_.token ? Reason::disagreement : Reason::nonsense, peer);
      lane.agreed = true;
      receive_segments(peer);
    }
    pass(lane.sends, lane.posted, lane.sent);
    if (lane.agreed) pass(lane.receives, ends_.size(), lane.received);
    const std::array<const Transfer*, 4> next = {&lane.header_in, &lane.header_out, at(lane.sends, lane.sent),
                                                 at(lane.receives, lane.received)};
    for (const auto* transfer : next) {
      if (transfer && transfer->failed())
        return failure(transfer->status == UCS_ERR_MESSAGE_TRUNCATED ? Reason::nonsense : Reason::lost, peer);
    }
  }
  return {};
}

Failure Round::failure(Reason reason, int peer) const {
  Failure failure{};
  failure.reason = reason;
  failure.finder = rank_;
  failure.peer = peer;
  failure.round = header_.epoch;
  failure.mine = agreement(header_);
  failure.theirs = agreement(lanes_[peer].theirs);
  return failure;
}

int64_t Round::arrived(int from) const {
  const auto& lane = lanes_[from];
  if (from == rank_) return lane.published;
  return lane.received == ends_.size() && lane.agreed ? header_.rows : start_of(ends_, lane.received);
}

bool Round::settled(int peer) const {
  const auto& lane = lanes_[peer];
  return peer == rank_ ||
         (lane.agreed && lane.header_out.done() && lane.received == ends_.size() && lane.sent == ends_.size());
}

void Round::close() {
  open_ = false;
  for (auto& lane : lanes_) lane.outgoing = lane.incoming = at::Tensor();
}

void Round::cancel() {
  for (auto& lane : lanes_) {
    for (auto& transfer : lane.receives) worker_->cancel_receive(transfer);
    worker_->cancel_receive(lane.header_in);
  }
}

}  // namespace weft::comm::ucx
