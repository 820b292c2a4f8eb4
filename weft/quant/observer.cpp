#include "weft/quant/observer.h"

#include <atomic>

namespace weft::quant {
namespace {

auto& slot() {
  static auto* instance = new std::atomic<std::shared_ptr<Observer>>;  // never destroyed: it may hold Python objects
  return *instance;
}

}  // namespace

std::shared_ptr<Observer> observer() { return slot().load(); }
void set_observer(std::shared_ptr<Observer> observer) { slot().store(std::move(observer)); }

}  // namespace weft::quant
