#pragma once
#include <c10/util/intrusive_ptr.h>

#include <string>

#include "weft/comm/host_identity.h"
#include "weft/comm/rendezvous.h"

namespace c10d {
class Store;
}

namespace weft::comm {

/// Ranks that are processes of one user on one host meet here. At each meeting a rank listens on a socket with a random
/// name and tells the name, its process and a random token through the Store. Peers connect, both sides check the user
/// and the process behind the connection and the token, and pass the descriptors of their memory. The sockets then
/// close.
class HostRendezvous final : public Rendezvous {
 public:
  struct Options {
    std::function<c10::intrusive_ptr<c10d::Store>()> store;  // of the group; asked at each meeting
    std::string prefix;                                      // of the keys; the same on all ranks
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
  class Handshake;  // one meeting

  Options options_;
  int64_t generation_ = 0;  // of the next meeting
  uint64_t group_id_ = 0;
  std::vector<Process> processes_;
};

}  // namespace weft::comm
