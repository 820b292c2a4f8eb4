#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace weft {

/// One value for each tensor, found by the tensor's identity. Holds tensors weakly: while a key is kept its address is
/// not used again, and values of tensors that are gone leave when the next value is made.
template <class Value>
class WeakTensorMap {
 public:
  std::shared_ptr<Value> find(const at::Tensor& t) const {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(t.unsafeGetTensorImpl());
    return found == entries_.end() ? nullptr : found->second.value;
  }

  /// The value of `t`, made if there is none.
  std::shared_ptr<Value> get(const at::Tensor& t) {
    std::vector<Entry> gone;  // dies after the lock: a value may need the GIL for that
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(t.unsafeGetTensorImpl());
    if (found != entries_.end()) return found->second.value;
    std::erase_if(entries_, [&](auto& entry) {
      const bool expired = entry.second.key.expired();
      if (expired) gone.push_back(std::move(entry.second));
      return expired;
    });
    auto value = std::make_shared<Value>();
    entries_.emplace(t.unsafeGetTensorImpl(), Entry{.key = Weak(t.getIntrusivePtr()), .value = value});
    return value;
  }

  size_t size() const {
    const std::lock_guard lock(mutex_);
    return entries_.size();
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
