#pragma once
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace weft::ops {

/// The run-time decisions of the last calls of one pass, for `explain()`. Thread-safe.
class PassReport {
 public:
  /// Replaces the text of the step that `rule` created at operation `first`.
  void set(int first, const std::string& rule, std::string text) {
    const std::lock_guard lock(mutex_);
    texts_.insert_or_assign({first, rule}, std::move(text));
  }
  /// Empty before the first call.
  std::string get(int first, const std::string& rule) const {
    const std::lock_guard lock(mutex_);
    const auto found = texts_.find({first, rule});
    return found == texts_.end() ? std::string() : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<int, std::string>, std::string> texts_;
};

struct CallReport {
  PassReport forward, backward;
};

}  // namespace weft::ops
