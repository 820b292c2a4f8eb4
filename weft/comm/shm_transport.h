#pragma once
#include "weft/comm/rendezvous.h"
#include "weft/comm/signals.h"
#include "weft/comm/transport.h"

namespace weft::comm {

/// Transport over shared memory: each rank writes its blocks into its own memory, and peers read them there.
///   const auto transport = std::make_unique<ShmTransport>(std::make_shared<HostRendezvous>(…));
/// connects the processes of a host that each call it. Tests connect threads instead
/// (tests/cpp/comm/thread_rendezvous.h).
///
/// A rank has two slots, for odd and even sequence numbers (signals.h defines when a slot is free). If a collective
/// needs more, the ranks compare fingerprints and then exchange larger slots; the old memory is unmapped with its last
/// tensor.
class ShmTransport final : public Transport {
 public:
  /// A collective call: every rank of the rendezvous makes it.
  explicit ShmTransport(std::shared_ptr<Rendezvous> rendezvous);
  ~ShmTransport() override;

  int rank() const override;
  int size() const override;
  std::string_view name() const override { return "shm"; }
  bool zero_copy() const override { return true; }

  std::unique_ptr<InFlightCollective> all_gather(const at::Tensor& local) override;
  std::unique_ptr<InFlightCollective> all_gather(int64_t rows, int64_t columns, at::ScalarType dtype) override;
  std::unique_ptr<InFlightCollective> reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) override;

 private:
  struct SharedState;  // shared by the transport and its collectives
  struct Slots;        // block memory of all ranks
  class ShmCollective;

  std::unique_ptr<ShmCollective> start(const CollectiveFingerprint& fingerprint);
  void grow(uint64_t seq, size_t slot_bytes);

  std::shared_ptr<SharedState> shared_;
  std::shared_ptr<const Slots> slots_;
};

}  // namespace weft::comm
