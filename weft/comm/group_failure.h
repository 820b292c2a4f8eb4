#pragma once
#include <atomic>
#include <mutex>
#include <string>

namespace weft::comm {

/// Whether a group can still be used by this rank. Its collectives and its link share one: what fails on either stops
/// both. Thread-safe.
class GroupFailure {
 public:
  explicit GroupFailure(std::string group) : group_(std::move(group)) {}

  const std::string& group() const { return group_; }
  /// The first one stays.
  void put(const std::string& reason);
  /// Raises DistError if the group has failed.
  void check() const {
    if (failed_.load(std::memory_order_acquire)) throw_failed();
  }

 private:
  [[noreturn]] void throw_failed() const;

  const std::string group_;
  std::atomic<bool> failed_ = false;
  mutable std::mutex mutex_;
  std::string reason_;
};

}  // namespace weft::comm
