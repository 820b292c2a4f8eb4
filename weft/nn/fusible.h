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
/// directly, it runs them as a pipeline.
class Fusible : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  /// The basic operations with their channels, in order.
  virtual std::vector<fuser::Stage> stages() const = 0;
  /// Their parameters, in the order of the operations.
  virtual std::vector<at::Tensor> op_parameters() const = 0;
  /// Reinitializes the parameters.
  virtual void reset_parameters() = 0;

  /// Forward for modules without extra inputs and outputs.
  at::Tensor forward(const at::Tensor& x);
  /// Returns the main output, then the extra outputs. An in-place operation may overwrite an extra input that is moved
  /// in and not referenced elsewhere. `buffers` are for operations with takes_buffers(); Buffers::op is a stage index.
  std::vector<at::Tensor> forward_extra(const at::Tensor& x, std::vector<at::Tensor> extras,
                                        const std::vector<ops::Buffers>& buffers = {});
  fuser::Explanation explain(const at::Tensor& x, const std::vector<at::Tensor>& extras = {});

  /// Whether any weight gradient is delayed until `backward_dw` (delay_wgrad_compute).
  bool need_backward_dw() const;
  /// Computes the weight gradients delayed by the oldest backward, last operation first, then runs the hooks. Does
  /// nothing if none are pending. Call it once per backward, even if that used the module several times.
  virtual void backward_dw();
  /// Registers a hook that runs after each `backward_dw` that computed a gradient.
  void register_wgrad_accumulation_and_reduce_hooks(std::function<void()> hook);

 protected:
  /// Registers and initializes the parameters of `op`.
  void register_op_parameters(const ops::BasicOp& op);
  void initialize(const ops::BasicOp& op);
  /// Copies another module's parameter values; for clone().
  void copy_values(const Fusible& other, const std::optional<at::Device>& device);

  /// Whether stage i runs in training mode.
  virtual bool stage_is_training(int) const { return is_training(); }
  /// Call it after `stages()` changes.
  void reset_fuser();

 private:
  std::shared_ptr<fuser::Fuser> fuser();
  uint64_t eval_mask(const fuser::Pipeline& pipeline) const;

  std::mutex mutex_;  // guards fuser_: the first calls may come from several threads
  std::shared_ptr<fuser::Fuser> fuser_;
  std::vector<std::function<void()>> wgrad_hooks_;
};

}  // namespace weft::nn
