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
class LaunchWatcher {
 public:
  LaunchWatcher() = default;
  LaunchWatcher(const LaunchWatcher&) = delete;
  LaunchWatcher& operator=(const LaunchWatcher&) = delete;
  virtual ~LaunchWatcher() = default;
  /// Runs `step`.
  virtual void run(Launch step) = 0;
};

/// Installs a watcher of all launches of the process, or none; returns the one before. It must outlive its time.
LaunchWatcher* watch_launches(LaunchWatcher* watcher);
LaunchWatcher* launch_watcher();

/// Torch's autograd and autocast are off while it lives: in a launch, also where that runs again.
struct Plainly {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset};
};

/// Runs `step`. It owns its buffers, reads their contents only now, and decides nothing by what it read that was
/// decided before: sizes and addresses are those it was made with.
template <class Step>
void launch(Step step) {
  auto plain = [step = std::move(step)] {
    const Plainly plainly;
    step();
  };
  if (auto* watcher = launch_watcher()) return watcher->run(Launch(std::move(plain)));
  plain();
}

/// What `compute()` returns, a tensor; if launches are watched, in memory that is written again when it runs again.
template <class Compute>
at::Tensor launch_aten(const Compute& compute) {
  auto result = compute();
  if (launch_watcher() && result.defined()) launch([=] { result.copy_(compute()); });
  return result;
}

/// Keeps the launches that run while it lives, and runs them again.
class Recording final : public LaunchWatcher {
 public:
  Recording() : before_(watch_launches(this)) {}
  ~Recording() override { stop(); }
  /// Later launches are not kept.
  void stop();
  /// All that was kept, in order, on the same buffers.
  void replay() const;
  size_t size() const { return steps_.size(); }

  void run(Launch step) override;

 private:
  LaunchWatcher* before_;
  bool live_ = true;
  std::vector<Launch> steps_;
};

}  // namespace weft::kernels
