#pragma once
#include <deque>
#include <mutex>
#include <vector>

#include "weft/ops/wgrad_sink.h"

namespace weft::ops {

/// Delayed weight gradients, oldest first. Filled on autograd's threads, emptied on the caller's.
class WgradQueue {
 public:
  void push(WgradGemm gemm);
  /// All of the oldest backward; raises if there are none, or if their tensors were written since.
  std::vector<WgradGemm> pop_oldest();
  /// How many backwards they belong to.
  size_t num_backwards() const;
  /// Raises if some wait.
  void assert_empty() const;

 private:
  struct Entry {
    WgradGemm gemm;
    int64_t version;  // of its tensors
  };

  mutable std::mutex mutex_;
  std::deque<Entry> entries_;
};

}  // namespace weft::ops
