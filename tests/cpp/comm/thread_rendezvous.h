#pragma once
#include <c10/util/Exception.h>

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

/// Copies with separate reference counts: updates of a shared count would synchronize the threads and hide races from
/// ThreadSanitizer.
inline SharedMemories own_pointers(const SharedMemories& common) {
  SharedMemories own;
  for (const auto& memory : common) own.emplace_back(memory.get(), [memory](SharedMemory*) {});
  return own;
}

inline SharedMemories ThreadRendezvous::exchange_memory(std::shared_ptr<SharedMemory> local,
                                                        const std::function<void()>& poll) {
  std::unique_lock lock(state_->mutex);
  const uint64_t generation = state_->generation;
  state_->offered[rank_] = std::move(local);
  if (++state_->arrived == size()) {
    state_->all = std::exchange(state_->offered, SharedMemories(size()));
    state_->arrived = 0;
    ++state_->generation;
    state_->changed.notify_all();
    return own_pointers(state_->all);
  }
  constexpr auto kPollInterval = std::chrono::milliseconds(10);
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  while (!state_->changed.wait_for(lock, kPollInterval, [&] { return state_->generation != generation; })) {
    poll();
    if (std::chrono::steady_clock::now() > deadline)
      C10_THROW_ERROR(DistError, c10::str("Rank ", rank_, " waited ", timeout_.count(), " ms for ", size(),
                                          " ranks to exchange memory; only ", state_->arrived, " arrived."));
  }
  return own_pointers(state_->all);
}

}  // namespace weft::comm
