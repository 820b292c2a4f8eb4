#include "weft/kernels/launch.h"

#include <atomic>

namespace weft::kernels {

static std::atomic<LaunchHook*> current{nullptr};

LaunchHook* set_launch_hook(LaunchHook* hook) { return current.exchange(hook); }
LaunchHook* launch_hook() { return current.load(std::memory_order_relaxed); }

void LaunchRecording::run(Launch kernel) {
  launches_.push_back(std::move(kernel));
  const auto& kept = launches_.back();
  previous_ ? previous_->run(kept) : kept();
}

void LaunchRecording::stop() {
  if (active_) set_launch_hook(previous_);
  active_ = false;
}

void LaunchRecording::replay() const {
  for (const auto& kernel : launches_) previous_ ? previous_->run(kernel) : kernel();
}

}  // namespace weft::kernels
