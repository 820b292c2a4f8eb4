#pragma once
#include "weft/comm/rendezvous.h"
#include "weft/comm/signals.h"
#include "weft/comm/transport.h"

namespace weft::comm {

/// A link through shared memory: each rank writes its blocks into its own memory, and peers read them there.
///   const auto transport = std::make_unique<ShmTransport>(std::make_shared<ThreadRendezvous>(state, rank, timeout));
/// makes one among threads, each calling it (thread_rendezvous.h); with a HostRendezvous it is among processes.
///
/// A rank has two slots, for odd and even rounds (signals.h says when one is free). They grow when a round needs more:
/// all ranks, having agreed on what the round is, meet with new memory; the old is unmapped when no tensor is left of
/// it.
class ShmTransport final : public Transport {
 public:
  /// Every rank of the meeting calls this at the same time.
  explicit ShmTransport(std::shared_ptr<Rendezvous> rendezvous);
  ~ShmTransport() override;

  int rank() const override;
  int size() const override;
  std::string_view name() const override { return "shm"; }
  bool zero_copy() const override { return true; }

  std::unique_ptr<InFlightCollective> all_gather(const at::Tensor& local) override;
  std::unique_ptr<InFlightCollective> all_gather(int64_t rows, int64_t columns, at::ScalarType dtype) override;
  std::unique_ptr<InFlightCollective> reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) override;

  /// Starts an all-gather and gives the memory for this rank's block. `all_gather` with the tensor, once it is written,
  /// goes on with that round and copies nothing. One at a time; the memory is used again two rounds later.
  at::Tensor prepare_all_gather(int64_t rows, int64_t columns, at::ScalarType dtype);

 private:
  struct SharedState;  // what a round and the link share
  struct Slots;        // memory of all ranks for blocks
  class ShmCollective;

  std::unique_ptr<ShmCollective> start(const CollectiveFingerprint& fingerprint);
  void grow(uint64_t seq, size_t slot_bytes);

  std::shared_ptr<SharedState> shared_;
  std::shared_ptr<const Slots> slots_;
  std::unique_ptr<ShmCollective> prepared_;
};

}  // namespace weft::comm
