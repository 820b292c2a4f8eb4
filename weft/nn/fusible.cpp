#include "weft/nn/fusible.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <ranges>

#include "weft/core/dispatch_keys.h"
#include "weft/core/errors.h"
#include "weft/ops/wgrad_attrs.h"

namespace weft::nn {

std::shared_ptr<fuser::Fuser> Fusible::fuser() {
  const std::lock_guard lock(mutex_);
  if (!fuser_) fuser_ = std::make_shared<fuser::Fuser>(fuser::Pipeline(stages()));
  return fuser_;
}

void Fusible::reset_fuser() {
  const std::lock_guard lock(mutex_);
  fuser_.reset();
}

uint64_t Fusible::eval_mask(const fuser::Pipeline& pipeline) const {
  uint64_t mask = 0;
  for (int i = 0; i < pipeline.size(); ++i)
    if (pipeline.eval_bit(i) >= 0 && !stage_is_training(i)) mask |= uint64_t{1} << pipeline.eval_bit(i);
  return mask;
}

at::Tensor Fusible::forward(const at::Tensor& x) {
  const auto fuser = this->fuser();
  auto outputs = (*fuser)(x, op_parameters(), {}, eval_mask(fuser->pipeline()));
  TORCH_CHECK_VALUE(outputs.size() == 1, name(), ": forward returns 1 output, but the pipeline also returns ",
                    outputs.size() - 1, " extra outputs. Call forward_extra.");
  return std::move(outputs[0]);
}

std::vector<at::Tensor> Fusible::forward_extra(const at::Tensor& x, std::vector<at::Tensor> extras,
                                               const std::vector<ops::Buffers>& buffers) {
  fuser::Tensors extra_inputs(std::make_move_iterator(extras.begin()), std::make_move_iterator(extras.end()));
  const auto fuser = this->fuser();
  auto outputs = (*fuser)(x, op_parameters(), std::move(extra_inputs), eval_mask(fuser->pipeline()), buffers);
  return {std::make_move_iterator(outputs.begin()), std::make_move_iterator(outputs.end())};
}

fuser::Explanation Fusible::explain(const at::Tensor& x, const std::vector<at::Tensor>& extras) {
  const auto fuser = this->fuser();
  return fuser::explain(*fuser, x, op_parameters(), extras, eval_mask(fuser->pipeline()));
}

bool Fusible::need_backward_dw() const {
  const auto list = stages();
  return std::any_of(list.begin(), list.end(), [](const auto& stage) { return stage.op->delays_wgrad(); });
}

bool Fusible::backward_dw() {
  const bool ran = compute_delayed_wgrad();
  if (ran)
    for (const auto& hook : wgrad_hooks_) hook();
  return ran;
}

bool Fusible::compute_delayed_wgrad() {
  const auto list = stages();
  const auto params = op_parameters();
  bool ran = false;
  auto offset = params.size();
  for (const auto& stage : std::views::reverse(list)) {
    const auto count = stage.op->params().size();
    offset -= count;
    const BelowAutograd below;
    ran |= with_label(name(), [&] { return stage.op->backward_dw({params.data() + offset, count}); });
  }
  return ran;
}

void Fusible::register_wgrad_accumulation_and_reduce_hooks(std::function<void()> hook) {
  wgrad_hooks_.push_back(std::move(hook));
}

void Fusible::register_op_parameters(const ops::BasicOp& op) {
  for (const auto& spec : op.params()) {
    const auto& param = register_parameter(spec.name, at::empty(spec.shape, at::TensorOptions().dtype(spec.dtype)));
    if (op.delays_wgrad() && spec.supports_main_grad) ops::wgrad_attrs(param).skip_backward_post_hook = true;
  }
  initialize(op);
}

void Fusible::initialize(const ops::BasicOp& op) {
  const at::NoGradGuard no_grad;
  for (const auto& spec : op.params()) {
    auto& param = named_parameters(/*recurse=*/false)[spec.name];
    if (spec.init == ops::Init::fan_in_uniform) {
      const auto bound = spec.fan_in == 0 ? 0.0 : 1 / std::sqrt(static_cast<double>(spec.fan_in));
      param.uniform_(-bound, bound);
    } else {
      param.fill_(spec.init == ops::Init::ones ? 1 : 0);
    }
  }
}

void Fusible::copy_values(const Fusible& other, const std::optional<at::Device>& device) {
  const at::NoGradGuard no_grad;
  auto mine = parameters(/*recurse=*/false);
  const auto theirs = other.parameters(/*recurse=*/false);
  for (size_t i = 0; i < mine.size(); ++i) {
    mine[i].set_data(device ? theirs[i].to(*device, /*non_blocking=*/false, /*copy=*/true) : theirs[i].clone());
    mine[i].requires_grad_(theirs[i].requires_grad());
  }
  train(other.is_training());
}

}  // namespace weft::nn
