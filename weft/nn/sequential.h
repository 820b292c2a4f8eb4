#pragma once
#include <torch/nn/pimpl.h>

#include "weft/nn/fusible.h"
#include "weft/nn/linear.h"
#include "weft/nn/operation.h"

namespace weft::nn {

/// Runs weft modules in sequence, as one pipeline with one autograd node.
class SequentialImpl : public Fusible {
 public:
  SequentialImpl() : Fusible("Sequential") {}
  /// From modules or their holders: Sequential(Linear(8, 8), op("GELU"), Linear(8, 8)).
  template <class... Modules>
    requires(sizeof...(Modules) > 0)
  explicit SequentialImpl(Modules&&... modules) : Fusible("Sequential") {
    (push_back(std::forward<Modules>(modules)), ...);
  }

  void push_back(std::shared_ptr<Fusible> module);
  template <class Impl>
  void push_back(const torch::nn::ModuleHolder<Impl>& holder) {
    push_back(std::static_pointer_cast<Fusible>(holder.ptr()));
  }
  size_t size() const { return modules_.size(); }
  const std::shared_ptr<Fusible>& operator[](size_t i) const { return modules_.at(i); }

  std::vector<fuser::Stage> stages() const override;
  std::vector<at::Tensor> op_parameters() const override;
  void reset_parameters() override;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

 protected:
  /// Calls `backward_dw` of each module, last first.
  bool compute_delayed_wgrad() override;
  bool stage_is_training(int i) const override;

 private:
  std::vector<std::shared_ptr<Fusible>> modules_;
};
TORCH_MODULE(Sequential);

}  // namespace weft::nn
