#include "weft/ops/wgrad_queue.h"

#include <set>

namespace weft::ops {
namespace {

/// Sum of the version counters; grows with each in-place write to a tensor of `gemm`.
int64_t version(const WgradGemm& gemm) {
  int64_t sum = 0;
  for (const auto* t : {&gemm.dy, &gemm.x, &gemm.splits})
    if (t->defined() && !t->is_inference()) sum += t->_version();
  return sum;
}

}  // namespace

void WgradQueue::push(WgradGemm gemm) {
  const auto seen = version(gemm);
  // Setting `.data` of the input later must not change what is multiplied.
  for (auto* t : {&gemm.dy, &gemm.x})
    if (t->defined()) *t = at::Tensor(t->tensor_data());
  const std::lock_guard lock(mutex_);
  entries_.push_back({.gemm = std::move(gemm), .version = seen});
}

std::vector<WgradGemm> WgradQueue::pop_oldest() {
  std::vector<WgradGemm> gemms;
  bool changed = false;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!entries_.empty(), "no weight gradient is pending. Call backward_dw() once after each backward.");
    const auto task = entries_.front().gemm.graph_task_id;
    std::erase_if(entries_, [&](Entry& entry) {
      if (entry.gemm.graph_task_id != task) return false;
      changed |= version(entry.gemm) != entry.version;
      gemms.push_back(std::move(entry.gemm));
      return true;
    });
  }
  TORCH_CHECK(
      !changed,
      "the input, the output gradient or the splits of a delayed weight gradient was modified in place after backward. "
      "Call backward_dw() before you reuse these tensors.");
  return gemms;
}

size_t WgradQueue::num_backwards() const {
  const std::lock_guard lock(mutex_);
  std::set<int64_t> tasks;
  for (const auto& entry : entries_) tasks.insert(entry.gemm.graph_task_id);
  return tasks.size();
}

void WgradQueue::assert_empty() const {
  const auto pending = num_backwards();
  TORCH_CHECK(pending == 0, "The weight gradients of ", pending,
              " backward calls are pending. Call backward_dw() once after each backward.");
}

}  // namespace weft::ops
