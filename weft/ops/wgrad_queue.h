#pragma once
#include <deque>
#include <mutex>
#include <vector>

#include "weft/ops/wgrad_sink.h"

namespace weft::ops {

/// Delayed weight gradients, oldest first. Pushed on autograd's threads, popped on the caller's thread.
class WgradQueue {
 public:
  void push(WgradGemm gemm);
  /// All gradients of the oldest backward. Raises if there are none, or if their tensors were modified since.
  std::vector<WgradGemm> pop_oldest();
  /// The number of backward calls they belong to.
  size_t num_backwards() const;
  /// Raises if any are pending.
  void assert_empty() const;

 private:
  struct Entry {
    WgradGemm gemm;
    int64_t version;  // sum of the version counters of its tensors
  };

  mutable std::mutex mutex_;
  std::deque<Entry> entries_;
};

}  // namespace weft::ops
