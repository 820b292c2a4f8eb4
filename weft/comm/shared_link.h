#pragma once
#include "weft/comm/exchange.h"
#include "weft/comm/meeting.h"
#include "weft/comm/signals.h"

namespace weft::comm {

/// A link through shared memory: each rank writes its blocks into its own memory, and peers read them there.
///   const auto link = std::make_unique<SharedLink>(std::make_shared<ThreadMeeting>(table, rank, timeout));
/// makes one among threads, each calling it (thread_meeting.h); with a HostMeeting it is among processes.
///
/// A rank has two slots, for odd and even rounds (signals.h says when one is free). They grow when a round needs more:
/// all ranks, having agreed on what the round is, meet with new memory; the old is unmapped when no tensor is left of
/// it.
class SharedLink final : public Link {
 public:
  /// Every rank of the meeting calls this at the same time.
  explicit SharedLink(std::shared_ptr<Meeting> meeting);
  ~SharedLink() override;

  int rank() const override;
  int size() const override;
  std::string_view name() const override { return "shm"; }
  bool in_place() const override { return true; }

  std::unique_ptr<Exchange> all_gather(const at::Tensor& mine) override;
  std::unique_ptr<Exchange> all_gather(int64_t rows, int64_t columns, at::ScalarType dtype) override;
  std::unique_ptr<Exchange> reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) override;

  /// Starts an all-gather and gives the memory for this rank's block. `all_gather` with the tensor, once it is written,
  /// goes on with that round and copies nothing. One at a time; the memory is used again two rounds later.
  at::Tensor place(int64_t rows, int64_t columns, at::ScalarType dtype);

 private:
  struct Core;   // what a round and the link share
  struct Slots;  // memory of all ranks for blocks
  class Round;

  std::unique_ptr<Round> start(const Agreement& about);
  void grow(uint64_t round, size_t slot_bytes);

  std::shared_ptr<Core> core_;
  std::shared_ptr<const Slots> slots_;
  std::unique_ptr<Round> placed_;
};

}  // namespace weft::comm
