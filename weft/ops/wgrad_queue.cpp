#include "weft/ops/wgrad_queue.h"

#include <set>

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

std::vector<WgradProduct> WgradQueue::pop_run() {
  std::vector<WgradProduct> products;
  bool changed = false;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!entries_.empty(), "No weight gradient is pending: call backward_dw() once after each backward.");
    const auto run = entries_.front().product.run;
    std::erase_if(entries_, [&](Entry& entry) {
      if (entry.product.run != run) return false;
      changed |= version(entry.product) != entry.version;
      products.push_back(std::move(entry.product));
      return true;
    });
  }
  TORCH_CHECK(
      !changed,
      "The input, the output gradient or the splits of a delayed weight gradient was modified in place after backward. "
      "Call backward_dw() before you reuse these tensors.");
  return products;
}

size_t WgradQueue::runs() const {
  const std::lock_guard lock(mutex_);
  std::set<int64_t> runs;
  for (const auto& entry : entries_) runs.insert(entry.product.run);
  return runs.size();
}

void WgradQueue::assert_empty() const {
  const auto pending = runs();
  TORCH_CHECK(pending == 0, "The weight gradients of ", pending,
              " backward passes are pending: call backward_dw() once after each backward.");
}

}  // namespace weft::ops
