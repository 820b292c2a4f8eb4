#include "weft/fused/epilogues.h"
#include "weft/ops/grouped_linear.h"
#include "weft/ops/scaled_activation.h"

namespace weft::fused {
namespace {

using ops::GroupedLinear;
using ops::ScaledActivation;

/// y = W2 z + b2,  z = s·act(h),  h = W1 x + b1, each row by the weights of its group. Keeps x, h and s; backward
/// computes z again. If nothing before the last linear wants a gradient z is kept instead of h.
class GroupedMlp final : public FusedOp {
 public:
  explicit GroupedMlp(const Match& m)
      : up_(m.find<GroupedLinear>()), activation_(m.find<ScaledActivation>()), down_(m.find<GroupedLinear>(1)) {}

  bool fills(const ops::OpPlan* plans, int part, int slot) const override {
    return part != down_.at || slot != GroupedLinear::kInput || !plans[activation_.at].records;
  }

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto up = ctx.op(up_.at), activation = ctx.op(activation_.at), down = ctx.op(down_.at);
    refuse_buffers(up, down);
    auto [h, input] = up_->product(up, x, ctx.params(up_.at));
    if (up_->weight_wanted(up)) up.save(GroupedLinear::kInput, std::move(input));

    const auto& scales = activation.extra_input(0);
    activation_->check_scales(h, scales);
    auto z = kernels::scaled_activation_forward(activation_->act(), h, scales);
    if (activation.records()) {
      activation.save(ScaledActivation::kInput, std::move(h));
      activation.save(ScaledActivation::kScales, scales);
    } else if (down_->weight_wanted(down)) {
      down.save(GroupedLinear::kInput, z);
    }
    return down_->output(down, down_->product(down, z, ctx.params(down_.at)).y, x);
  }

  at::Tensor backward(StepContext& ctx, const at::Tensor& dy) const override {
    auto up = ctx.op(up_.at), activation = ctx.op(activation_.at), down = ctx.op(down_.at);
    const auto& h = activation.saved(ScaledActivation::kInput);
    const auto& scales = activation.saved(ScaledActivation::kScales);
    auto z = down.saved(GroupedLinear::kInput);
    if (!z.defined() && down_->weight_wanted(down))
      z = kernels::scaled_activation_forward(activation_->act(), h, scales);
    const auto dz =
        down_->differentiate(down, down_->output_gradient(down, dy, ctx.params(down_.at)), ctx.params(down_.at), z);
    z.reset();
    if (!dz.defined()) return {};
    auto [dh, ds] = kernels::scaled_activation_backward(activation_->act(), dz, h, scales, activation.input_wanted(),
                                                        activation.extra_wanted(0));
    if (ds.defined()) activation.set_extra_input_grad(0, std::move(ds));
    if (!dh.defined()) return {};
    const auto dx = up_->differentiate(up, dh, ctx.params(up_.at), up.saved(GroupedLinear::kInput));
    return up_->input_gradient(up, dx, dy);
  }

 private:
  /// What lies between the two linears has no memory of the caller's.
  static void refuse_buffers(const ops::OpContext& up, const ops::OpContext& down) {
    TORCH_CHECK_VALUE(!up.buffers() || !up.buffers()->output.defined(),
                      "GroupedLinear: the buffer 'output' was given to the first linear of a fused grouped MLP, which "
                      "returns nothing; it belongs to the last one.");
    TORCH_CHECK_VALUE(!down.buffers() || !down.buffers()->grad_input.defined(),
                      "GroupedLinear: the buffer 'grad_input' was given to the last linear of a fused grouped MLP, "
                      "whose input is inside it; it belongs to the first one.");
  }

  Part<GroupedLinear> up_;
  Part<ScaledActivation> activation_;
  Part<GroupedLinear> down_;
};

std::string refuse(const Match& m, const PlanView& view) {
  const auto& up = m.find<GroupedLinear>()->options();
  const auto& down = m.find<GroupedLinear>(1)->options();
  const auto& act = m.get<ScaledActivation>().act();
  if (up.num_groups != down.num_groups) return "the two linears have different numbers of groups";
  if (up.out_features != down.in_features * (act.gated() ? 2 : 1))
    return "the last linear does not take what the activation returns";
  return refuse_mixed_dtypes(m, view, 0, m.size() - 1);
}

std::vector<ops::OpPtr> sample() {
  return {
      std::make_shared<GroupedLinear>(GroupedLinear::Options{.num_groups = 3, .in_features = 8, .out_features = 12}),
      std::make_shared<ops::ScaledSwiGLU>(ops::ScaledSwiGLU::Options{}),
      std::make_shared<GroupedLinear>(
          GroupedLinear::Options{.num_groups = 3, .in_features = 6, .out_features = 4, .scale_bias = true})};
}

}  // namespace

FusionRule joint_grouped_mlp() {
  return {.name = "grouped_mlp",
          .pass = Pass::joint,
          .pattern = {one<GroupedLinear>(), one<ScaledActivation>(), one<GroupedLinear>()},
          .refuse = refuse,
          .make = make_fused<GroupedMlp>,
          .sample = sample,
          .rewrite = {}};
}

}  // namespace weft::fused
