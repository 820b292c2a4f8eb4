#include "weft/kernels/launch.h"

#include <atomic>

namespace weft::kernels {

static std::atomic<LaunchWatcher*> current{nullptr};

LaunchWatcher* watch_launches(LaunchWatcher* watcher) { return current.exchange(watcher); }
LaunchWatcher* launch_watcher() { return current.load(std::memory_order_relaxed); }

void Recording::run(Launch step) {
  steps_.push_back(std::move(step));
  const auto& kept = steps_.back();
  before_ ? before_->run(kept) : kept();
}

void Recording::stop() {
  if (live_) watch_launches(before_);
  live_ = false;
}

void Recording::replay() const {
  for (const auto& step : steps_) before_ ? before_->run(step) : step();
}

}  // namespace weft::kernels
