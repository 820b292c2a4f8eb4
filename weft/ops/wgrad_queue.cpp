#include "weft/ops/wgrad_queue.h"

namespace weft::ops {
namespace {

/// Grows whenever one of its tensors is written.
int64_t version(const WgradProduct& product) {
  int64_t sum = 0;
  for (const auto* t : {&product.dy, &product.x, &product.splits})
    if (t->defined() && !t->is_inference()) sum += t->_version();
  return sum;
}

}  // namespace

void WgradQueue::put(WgradProduct product) {
  const auto seen = version(product);
  const std::lock_guard lock(mutex_);
  entries_.push_back({.product = std::move(product), .version = seen});
}

WgradProduct WgradQueue::pop() {
  Entry entry;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!entries_.empty(), "No weight gradient waits: call backward_dw() once after each backward.");
    entry = std::move(entries_.front());
    entries_.pop_front();
  }
  TORCH_CHECK(
      version(entry.product) == entry.version,
      "The input, the output gradient or the splits of a delayed weight gradient was modified in place after backward. "
      "Call backward_dw() before you reuse these tensors.");
  return std::move(entry.product);
}

size_t WgradQueue::size() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

void WgradQueue::assert_empty() const {
  const auto waiting = size();
  TORCH_CHECK(waiting == 0, waiting, " weight gradients still wait: call backward_dw() once after each backward.");
}

}  // namespace weft::ops
