#include "weft/comm/thread_rendezvous.h"

#include <c10/util/Exception.h>

namespace weft::comm {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(10);

/// Copies with separate reference counts: updates of a shared count would synchronize the threads and hide races from
/// ThreadSanitizer.
SharedMemories own_pointers(const SharedMemories& common) {
  SharedMemories own;
  for (const auto& memory : common) own.emplace_back(memory.get(), [memory](SharedMemory*) {});
  return own;
}

}  // namespace

SharedMemories ThreadRendezvous::exchange_memory(std::shared_ptr<SharedMemory> local,
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
