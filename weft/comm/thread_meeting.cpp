#include "weft/comm/thread_meeting.h"

#include <c10/util/Exception.h>

namespace weft::comm {
namespace {

constexpr auto kLook = std::chrono::milliseconds(10);

/// Pointers with counters of this thread's own: common ones would order the threads that touch them, and so hide from
/// the thread sanitizer that something else does not.
Memories own_pointers(const Memories& common) {
  Memories own;
  for (const auto& memory : common) own.emplace_back(memory.get(), [memory](Memory*) {});
  return own;
}

}  // namespace

Memories ThreadMeeting::meet(std::shared_ptr<Memory> mine, const std::function<void()>& look) {
  std::unique_lock lock(table_->mutex);
  const uint64_t round = table_->round;
  table_->given[rank_] = std::move(mine);
  if (++table_->arrived == size()) {
    table_->all = std::exchange(table_->given, Memories(size()));
    table_->arrived = 0;
    ++table_->round;
    table_->changed.notify_all();
    return own_pointers(table_->all);
  }
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  while (!table_->changed.wait_for(lock, kLook, [&] { return table_->round != round; })) {
    look();
    if (std::chrono::steady_clock::now() > deadline)
      C10_THROW_ERROR(DistError, c10::str("Rank ", rank_, " waited ", timeout_.count(), " ms with memory for ", size(),
                                          " ranks; only ", table_->arrived, " came."));
  }
  return own_pointers(table_->all);
}

}  // namespace weft::comm
