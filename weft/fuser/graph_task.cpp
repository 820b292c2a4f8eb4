#include "weft/fuser/graph_task.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace weft::fuser {
namespace {

using torch::autograd::GraphTask;

/// The number of backwards that enclose the current one. Autograd does not expose the current GraphTask, but it exposes
/// the address of its member `exec_info_`.
int nesting_depth() {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (!info) return 0;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  const auto* task = reinterpret_cast<const std::byte*>(info) - offsetof(GraphTask, exec_info_);
#pragma GCC diagnostic pop
  return reinterpret_cast<const GraphTask*>(task)->reentrant_depth_;
}

/// An outermost backward that recomputes activations. Its final callback holds `alive`, so the reference expires with
/// the graph task, whether that succeeds or fails.
struct OuterBackward {
  std::thread::id thread;
  int64_t id;
  std::weak_ptr<void> alive;
};

std::mutex mutex;
std::vector<OuterBackward> running;

const OuterBackward* of_this_thread() {
  std::erase_if(running, [](const OuterBackward& task) { return task.alive.expired(); });
  const auto found = std::find_if(running.begin(), running.end(),
                                  [](const OuterBackward& task) { return task.thread == std::this_thread::get_id(); });
  return found == running.end() ? nullptr : &*found;
}

}  // namespace

void track_recompute() {
  const auto id = torch::autograd::get_current_graph_task_id();
  if (id < 0 || nesting_depth() > 0) return;
  const std::lock_guard lock(mutex);
  if (of_this_thread()) return;
  const auto alive = std::make_shared<int>(0);
  torch::autograd::Engine::get_default_engine().queue_callback([alive] {});
  running.push_back({std::this_thread::get_id(), id, alive});
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

int64_t outermost_graph_task_id() {
  if (nesting_depth() == 0) return torch::autograd::get_current_graph_task_id();
  const std::lock_guard lock(mutex);
  const auto* outermost = of_this_thread();
  TORCH_CHECK(
      outermost,
      "weft: overwrite_main_grad and delay_wgrad_compute are not supported in a backward started inside another one, "
      "unless the outer one recomputes the forward pass, as torch.utils.checkpoint does. Run the inner backward "
      "outside the outer one, or turn the options off.");
  return outermost->id;
}

bool computes_gradient_of(const at::Tensor& leaf) {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (!info || info->empty()) return true;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  const auto found = info->find(accumulator.get());
  return found != info->end() && found->second.should_execute();
}

}  // namespace weft::fuser
