#pragma once
#include <condition_variable>
#include <mutex>

#include "weft/comm/rendezvous.h"

namespace weft::comm {

/// Rendezvous of ranks that are threads of one process, without sockets or a Store. All threads use the same mapping of
/// each memory, so that ThreadSanitizer sees their accesses.
///   const auto state = std::make_shared<ThreadRendezvousState>(4);  // one for all threads
///   ThreadRendezvous rendezvous(state, rank, timeout);              // one per thread
struct ThreadRendezvousState {
  explicit ThreadRendezvousState(int size) : offered(size) {}
  std::mutex mutex;
  std::condition_variable changed;
  SharedMemories offered, all;
  int arrived = 0;
  uint64_t generation = 0;
};

class ThreadRendezvous final : public Rendezvous {
 public:
  ThreadRendezvous(std::shared_ptr<ThreadRendezvousState> state, int rank, std::chrono::milliseconds timeout)
      : state_(std::move(state)), rank_(rank), timeout_(timeout) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(state_->offered.size()); }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  SharedMemories exchange_memory(std::shared_ptr<SharedMemory> local, const std::function<void()>& poll) override;
  uint64_t group_id() const override { return reinterpret_cast<uintptr_t>(state_.get()); }
  const Process& process(int) const override { return no_process_; }

 private:
  std::shared_ptr<ThreadRendezvousState> state_;
  int rank_;
  std::chrono::milliseconds timeout_;
  Process no_process_;
};

}  // namespace weft::comm
