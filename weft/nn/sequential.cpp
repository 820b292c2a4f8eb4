#include "weft/nn/sequential.h"

#include <ranges>

namespace weft::nn {

void SequentialImpl::push_back(std::shared_ptr<Fusible> module) {
  register_module(std::to_string(modules_.size()), module);
  modules_.push_back(std::move(module));
  reset_fuser();
}

std::vector<fuser::Stage> SequentialImpl::stages() const {
  std::vector<fuser::Stage> list;
  for (size_t i = 0; i < modules_.size(); ++i) {
    for (auto& stage : modules_[i]->stages()) {
      stage.label = "Sequential[" + std::to_string(i) + "] " + modules_[i]->name();
      list.push_back(std::move(stage));
    }
  }
  return list;
}

std::vector<at::Tensor> SequentialImpl::op_parameters() const {
  std::vector<at::Tensor> list;
  for (const auto& module : modules_)
    for (auto& param : module->op_parameters()) list.push_back(std::move(param));
  return list;
}

void SequentialImpl::reset_parameters() {
  for (const auto& module : modules_) module->reset_parameters();
}

bool SequentialImpl::compute_delayed_wgrad() {
  bool ran = false;
  for (const auto& module : std::views::reverse(modules_)) ran |= module->backward_dw();
  return ran;
}

std::shared_ptr<torch::nn::Module> SequentialImpl::clone(const std::optional<at::Device>& device) const {
  auto copy = std::make_shared<SequentialImpl>();
  for (const auto& module : modules_) copy->push_back(std::dynamic_pointer_cast<Fusible>(module->clone(device)));
  copy->train(is_training());
  return copy;
}

bool SequentialImpl::stage_is_training(int i) const {
  for (const auto& module : modules_) {
    const int count = static_cast<int>(module->stages().size());
    if (i < count) return module->is_training();
    i -= count;
  }
  return is_training();
}

}  // namespace weft::nn
