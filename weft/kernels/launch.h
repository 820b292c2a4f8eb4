#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <utility>
#include <vector>

namespace weft::kernels {

/// What a kernel does once its buffers are fixed: a closure over them, which may run again.
using Launch = std::function<void()>;

/// Stands between a launch and its run.
class LaunchHook {
 public:
  LaunchHook() = default;
  LaunchHook(const LaunchHook&) = delete;
  LaunchHook& operator=(const LaunchHook&) = delete;
  virtual ~LaunchHook() = default;
  /// Runs `kernel`.
  virtual void run(Launch kernel) = 0;
};

/// Installs a watcher of all launches of the process, or none; returns the one before. It must outlive its time.
LaunchHook* set_launch_hook(LaunchHook* hook);
LaunchHook* launch_hook();

/// Torch's autograd and autocast are off while it lives: in a launch, also where that runs again.
struct BelowAutogradGuard {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset};
};

/// Runs `kernel`. It owns its buffers, reads their contents only now, and decides nothing by what it read that was
/// decided before: sizes and addresses are those it was made with.
template <class Kernel>
void launch(Kernel kernel) {
  auto guarded = [kernel = std::move(kernel)] {
    const BelowAutogradGuard below_autograd;
    kernel();
  };
  if (auto* hook = launch_hook()) return hook->run(Launch(std::move(guarded)));
  guarded();
}

/// What `compute()` returns, a tensor; if launches are watched, in memory that is written again when it runs again.
template <class Compute>
at::Tensor launch_aten(const Compute& compute) {
  auto result = compute();
  if (launch_hook() && result.defined()) launch([=] { result.copy_(compute()); });
  return result;
}

/// Keeps the launches that run while it lives, and runs them again.
class LaunchRecording final : public LaunchHook {
 public:
  LaunchRecording() : previous_(set_launch_hook(this)) {}
  ~LaunchRecording() override { stop(); }
  /// Later launches are not kept.
  void stop();
  /// All that was kept, in order, on the same buffers.
  void replay() const;
  size_t size() const { return launches_.size(); }

  void run(Launch kernel) override;

 private:
  LaunchHook* previous_;
  bool active_ = true;
  std::vector<Launch> launches_;
};

}  // namespace weft::kernels
