#include "weft/quant/observer.h"

#include <atomic>
#include <mutex>

namespace weft::quant {
namespace {

struct Slot {
  std::atomic<bool> used = false;  // so that calls without an observer take no lock
  std::mutex mutex;
  std::shared_ptr<Observer> observer;
};
Slot& slot() {
  static auto* instance = new Slot;  // never destroyed: it may hold Python objects
  return *instance;
}

}  // namespace

std::shared_ptr<Observer> observer() {
  auto& s = slot();
  if (!s.used.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard lock(s.mutex);
  return s.observer;
}

void set_observer(std::shared_ptr<Observer> observer) {
  auto& s = slot();
  {
    const std::lock_guard lock(s.mutex);
    s.used.store(observer != nullptr, std::memory_order_release);
    s.observer.swap(observer);
  }  // the earlier one is destroyed without the lock: that may take Python's
}

}  // namespace weft::quant
