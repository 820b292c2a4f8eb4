#pragma once
#include <deque>
#include <mutex>

#include "weft/ops/wgrad_sink.h"

namespace weft::ops {

/// Weight gradients that were put off, oldest first. Filled on an engine thread, emptied on the caller's.
class WgradQueue {
 public:
  void put(WgradProduct product);
  /// The oldest one; raises if none waits, or if its tensors were written since.
  WgradProduct pop();
  size_t size() const;
  /// Raises if some wait.
  void assert_empty() const;

 private:
  struct Entry {
    WgradProduct product;
    int64_t version;  // of its tensors
  };

  mutable std::mutex mutex_;
  std::deque<Entry> entries_;
};

}  // namespace weft::ops
