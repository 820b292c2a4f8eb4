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

/// A torch::nn module that a pipeline can take in: it owns the parameters of a few basic operations. Called alone, it
/// runs a pipeline of its own.
class Fusible : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  /// Its basic operations with their channels, in order.
  virtual std::vector<fuser::Stage> stages() const = 0;
  /// Their parameters, in the order of the operations.
  virtual std::vector<at::Tensor> op_parameters() const = 0;
  /// Initialises the parameters anew.
  virtual void reset_parameters() = 0;

  /// For operations without extra tensors.
  at::Tensor forward(const at::Tensor& x);
  /// The main output and the extra ones. An extra input that is moved in and held nowhere else may be overwritten by an
  /// operation with `in_place`. `buffers` say where results of operations that take them go; Buffers::op counts stages.
  std::vector<at::Tensor> forward_extra(const at::Tensor& x, std::vector<at::Tensor> extras,
                                        const std::vector<ops::Buffers>& buffers = {});
  fuser::Explanation explain(const at::Tensor& x, const std::vector<at::Tensor>& extras = {});

  /// Whether some weight gradient is put off until `backward_dw` (delay_wgrad_compute).
  bool need_backward_dw() const;
  /// Computes the weight gradients that the oldest backward delayed, last operation first, then runs the hooks. Does
  /// nothing if none are pending. Call it once after each backward, however often the module was used in it.
  virtual void backward_dw();
  /// `hook` runs after each `backward_dw` that computed something.
  void register_wgrad_accumulation_and_reduce_hooks(std::function<void()> hook);

 protected:
  /// Registers and initialises what `op` asks for.
  void register_op_parameters(const ops::BasicOp& op);
  void initialize(const ops::BasicOp& op);
  /// Takes copies of another module's parameter values; for clone().
  void copy_values(const Fusible& other, const std::optional<at::Device>& device);

  /// Whether stage i runs in training mode.
  virtual bool stage_is_training(int) const { return is_training(); }
  /// Call it when `stages()` changed.
  void reset_fuser();

 private:
  std::shared_ptr<fuser::Fuser> fuser();
  uint64_t eval_mask(const fuser::Pipeline& pipeline) const;

  std::mutex mutex_;  // of fuser_: the first calls may come from several threads
  std::shared_ptr<fuser::Fuser> fuser_;
  std::vector<std::function<void()>> wgrad_hooks_;
};

}  // namespace weft::nn
