#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace weft {

/// Maps tensors, by identity, to values. Keys are weak references: a key's address is not reused while its entry
/// exists. Entries of destroyed tensors are erased when the next value is inserted.
template <class Value>
class WeakTensorMap {
 public:
  std::shared_ptr<Value> find(const at::Tensor& t) const {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(t.unsafeGetTensorImpl());
    return found == entries_.end() ? nullptr : found->second.value;
  }

  /// The value of `t`; inserts a default-constructed one if there is none.
  std::shared_ptr<Value> get(const at::Tensor& t) {
    std::vector<Entry> removed;  // destroyed after the lock is released: a value's destructor may acquire the GIL
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(t.unsafeGetTensorImpl());
    if (found != entries_.end()) return found->second.value;
    std::erase_if(entries_, [&](auto& entry) {
      const bool expired = entry.second.key.expired();
      if (expired) removed.push_back(std::move(entry.second));
      return expired;
    });
    auto value = std::make_shared<Value>();
    entries_.emplace(t.unsafeGetTensorImpl(), Entry{.key = Weak(t.getIntrusivePtr()), .value = value});
    return value;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    Weak key;
    std::shared_ptr<Value> value;
  };

  mutable std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
};

}  // namespace weft
