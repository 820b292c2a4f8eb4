#pragma once
#include <condition_variable>
#include <mutex>

#include "weft/comm/meeting.h"

namespace weft::comm {

/// Ranks that are threads of one process meet here: all use one mapping of each memory, so that the thread sanitizer
/// sees what they do to it. No socket, no Store.
///   const auto table = std::make_shared<ThreadTable>(4);   // shared by the threads
///   ThreadMeeting meeting(table, rank, timeout);           // one in each
struct ThreadTable {
  explicit ThreadTable(int size) : given(size) {}
  std::mutex mutex;
  std::condition_variable changed;
  Memories given, all;
  int arrived = 0;
  uint64_t round = 0;
};

class ThreadMeeting final : public Meeting {
 public:
  ThreadMeeting(std::shared_ptr<ThreadTable> table, int rank, std::chrono::milliseconds timeout)
      : table_(std::move(table)), rank_(rank), timeout_(timeout) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(table_->given.size()); }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  Memories meet(std::shared_ptr<Memory> mine, const std::function<void()>& look) override;
  uint64_t group() const override { return reinterpret_cast<uintptr_t>(table_.get()); }
  const Process& process(int) const override { return nobody_; }

 private:
  std::shared_ptr<ThreadTable> table_;
  int rank_;
  std::chrono::milliseconds timeout_;
  Process nobody_;
};

}  // namespace weft::comm
