#include "weft/ops/wgrad_queue.h"

namespace weft::ops {
namespace {

int64_t version(const at::Tensor& t) { return t.is_inference() ? 0 : t._version(); }

}  // namespace

void WgradQueue::put(WgradProduct product) {
  const auto dy_version = version(product.dy), x_version = version(product.x);
  const std::lock_guard lock(mutex_);
  entries_.push_back({.product = std::move(product), .dy_version = dy_version, .x_version = x_version});
}

WgradProduct WgradQueue::pop() {
  Entry entry;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!entries_.empty(), "No weight gradient waits: call backward_dw() once after each backward.");
    entry = std::move(entries_.front());
    entries_.pop_front();
  }
  TORCH_CHECK(version(entry.product.x) == entry.x_version && version(entry.product.dy) == entry.dy_version,
              "The input or the output gradient of a delayed weight gradient was modified in place after backward. "
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
