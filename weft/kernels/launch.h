#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "weft/core/dispatch_keys.h"

namespace weft::kernels {

/// The work of a kernel as a closure over its buffers. It may run more than once.
using Launch = std::function<void()>;

/// Intercepts every launch, e.g. to record it.
class LaunchHook {
 public:
  LaunchHook() = default;
  LaunchHook(const LaunchHook&) = delete;
  LaunchHook& operator=(const LaunchHook&) = delete;
  virtual ~LaunchHook() = default;
  /// Runs `kernel`.
  virtual void run(Launch kernel) = 0;
};

/// Installs the launch hook of the process (null: none) and returns the previous one. The hook must stay alive while it
/// is installed.
LaunchHook* set_launch_hook(LaunchHook* hook);
LaunchHook* launch_hook();

/// Runs `kernel`, a closure that owns its buffers, below autograd. Sizes and addresses are fixed when it is created; it
/// may read the contents of tensors only when it runs, because a replay reads new contents.
template <class Kernel>
void launch(Kernel kernel) {
  auto guarded = [kernel = std::move(kernel)] {
    const BelowAutograd below;
    kernel();
  };
  if (auto* hook = launch_hook()) return hook->run(Launch(std::move(guarded)));
  guarded();
}

/// Returns the tensor that `compute()` returns. With a launch hook, a replay computes it again into the same memory.
template <class Compute>
at::Tensor launch_aten(const Compute& compute) {
  auto result = compute();
  if (launch_hook() && result.defined()) launch([=] { result.copy_(compute()); });
  return result;
}

/// Records the launches between its construction and `stop`, for replay.
class LaunchRecording final : public LaunchHook {
 public:
  LaunchRecording() : previous_(set_launch_hook(this)) {}
  ~LaunchRecording() override { stop(); }
  /// Ends the recording.
  void stop();
  /// Runs the recorded launches in order, on the same buffers.
  void replay() const;
  size_t size() const { return launches_.size(); }

  void run(Launch kernel) override;

 private:
  LaunchHook* previous_;
  bool active_ = true;
  std::vector<Launch> launches_;
};

}  // namespace weft::kernels
