#pragma once
#include <c10/util/intrusive_ptr.h>

#include <string>

#include "weft/comm/host_identity.h"
#include "weft/comm/rendezvous.h"

namespace c10d {
class Store;
}

namespace weft::comm {

/// Rendezvous of ranks that are processes of one user on one host. For each exchange a rank listens on a socket with a
/// random name and writes an endpoint record (name, process, random token) to the Store. Peers connect; both sides
/// check the user and process of the connection and the token, and pass the file descriptors of their memory. Then the
/// sockets close.
class HostRendezvous final : public Rendezvous {
 public:
  struct Options {
    std::function<c10::intrusive_ptr<c10d::Store>()> store;  // called for each exchange
    std::string prefix;                                      // of the Store keys; the same on all ranks
    int rank = 0;
    int size = 1;
    std::chrono::milliseconds timeout{};
  };

  explicit HostRendezvous(Options options) : options_(std::move(options)), processes_(options_.size) {}

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  std::chrono::milliseconds timeout() const override { return options_.timeout; }
  SharedMemories exchange_memory(std::shared_ptr<SharedMemory> local, const std::function<void()>& poll) override;
  uint64_t group_id() const override { return group_id_; }
  const Process& process(int rank) const override { return processes_[rank]; }

 private:
  class Handshake;  // one exchange

  Options options_;
  int64_t generation_ = 0;  // number of the next exchange
  uint64_t group_id_ = 0;
  std::vector<Process> processes_;
};

}  // namespace weft::comm
