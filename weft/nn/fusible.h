#pragma once
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "weft/fuser/explain.h"
#include "weft/fuser/fuser.h"

namespace weft::nn {

/// A torch::nn module that can be part of a pipeline. It owns the parameters of one or more basic operations. Called
/// directly, it runs them as a pipeline. An operation may take and return extra tensors besides x and y; a channel is a
/// name that connects an extra output to an extra input of a later operation.
class Fusible : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  /// The basic operations with their channels, in order.
  virtual std::vector<fuser::Stage> stages() const = 0;
  /// The parameters of these operations, in the same order.
  virtual std::vector<at::Tensor> op_parameters() const = 0;
  /// Reinitializes the parameters.
  virtual void reset_parameters() = 0;

  /// Forward for modules without extra inputs and outputs.
  at::Tensor forward(const at::Tensor& x);
  /// Returns the main output, then the extra outputs. An in-place operation may overwrite an extra input that is moved
  /// in and not referenced elsewhere. `buffers` are for operations with takes_buffers(); Buffers::op is a stage index.
  std::vector<at::Tensor> forward_extra(const at::Tensor& x, std::vector<at::Tensor> extras,
                                        const std::vector<ops::Buffers>& buffers = {});
  /// The plan of a call with these inputs. Runs no operation.
  fuser::Explanation explain(const at::Tensor& x, const std::vector<at::Tensor>& extras = {});

  /// Whether any weight gradient is delayed until `backward_dw` (delay_wgrad_compute).
  bool need_backward_dw() const;
  /// Computes the weight gradients delayed by the oldest backward, last operation first, then runs the hooks. Does
  /// nothing and returns false if none are pending. Call it once per backward, even if that used the module several
  /// times.
  bool backward_dw();
  /// Registers a hook that runs after each `backward_dw` that computed a gradient.
  void register_wgrad_accumulation_and_reduce_hooks(std::function<void()> hook);

 protected:
  /// Registers and initializes the parameters of `op`.
  void register_op_parameters(const ops::BasicOp& op);
  /// Initializes the registered parameters of `op`.
  void initialize(const ops::BasicOp& op);
  /// Copies the parameter values, `requires_grad` and the training mode of another module; for clone().
  void copy_values(const Fusible& other, const std::optional<at::Device>& device);

  /// backward_dw without the hooks of this module.
  virtual bool compute_delayed_wgrad();
  /// Whether stage i runs in training mode.
  virtual bool stage_is_training(int /*i*/) const { return is_training(); }
  /// Discards the pipeline and its plans. Call it whenever the result of `stages()` changes.
  void reset_fuser();

 private:
  std::shared_ptr<fuser::Fuser> fuser();
  /// One bit for each operation that depends on training mode, set if it runs in evaluation mode.
  uint64_t eval_mask(const fuser::Pipeline& pipeline) const;

  std::mutex mutex_;  // guards fuser_: the first calls may come from several threads
  std::shared_ptr<fuser::Fuser> fuser_;
  std::vector<std::function<void()>> wgrad_hooks_;
};

}  // namespace weft::nn
