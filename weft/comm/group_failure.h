#pragma once
#include <atomic>
#include <mutex>
#include <string>

namespace weft::comm {

/// Failure state of a group on this rank, shared by its collectives and its transport: an error in one fails both.
/// Thread-safe.
class GroupFailure {
 public:
  explicit GroupFailure(std::string group) : group_(std::move(group)) {}

  const std::string& group() const { return group_; }
  /// Keeps the first reason.
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
