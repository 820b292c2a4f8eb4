#pragma once
#include <deque>
#include <mutex>
#include <vector>

#include "weft/ops/wgrad_sink.h"

namespace weft::ops {

/// Delayed weight gradients, oldest first. Filled on autograd's threads, emptied on the caller's.
class WgradQueue {
 public:
  void put(WgradProduct product);
  /// All of the oldest backward; raises if there are none, or if their tensors were written since.
  std::vector<WgradProduct> pop_run();
  /// How many backwards they belong to.
  size_t runs() const;
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
