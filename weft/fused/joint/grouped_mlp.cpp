#include "weft/fused/epilogues.h"
#include "weft/ops/grouped_linear.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/scaled_activation.h"

namespace weft::fused {
namespace {

using ops::GroupedLinear;
using ops::ScaledActivation;

/// y = z W2ᵀ + b2,  z = s·act(h),  h = x W1ᵀ + b1, each row with the weights of its group; s has one scale per row.
/// Saves x, h and s; backward recomputes z. Saves only z if nothing before the last linear needs a gradient.
class GroupedMlp final : public JointFusion {
 public:
  explicit GroupedMlp(const Match& m)
      : up_(m.find<GroupedLinear>()), activation_(m.find<ScaledActivation>()), down_(m.find<GroupedLinear>(1)) {}

  bool reads_saved(const ops::OpPlan* plans, int index, int slot) const override {
    return index != down_.index || slot != GroupedLinear::kInput || !plans[activation_.index].needs_grad;
  }

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto up = ctx.op(up_.index), activation = ctx.op(activation_.index), down = ctx.op(down_.index);
    reject_buffers(up, down);
    auto [h, input] = up_->forward_gemm(up, x, ctx.params(up_.index));
    if (up_->needs_weight_grad(up)) up.save(GroupedLinear::kInput, std::move(input));

    const auto& scales = activation.extra_input(0);
    activation_->check_scales(h, scales);
    auto z = kernels::scaled_activation_forward(activation_->act(), h, scales);
    if (activation.needs_grad()) {
      activation.save(ScaledActivation::kInput, ops::restore_leading_dims(h, x));
      activation.save(ScaledActivation::kScales, scales);
    }
    if (down_->needs_weight_grad(down)) down.save(GroupedLinear::kInput, ops::restore_leading_dims(z, x));
    return down_->finish_output(down, down_->forward_gemm(down, z, ctx.params(down_.index)).y, x);
  }

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    const auto& dy = grad.value;
    auto up = ctx.op(up_.index), activation = ctx.op(activation_.index), down = ctx.op(down_.index);
    const auto h = matrix_of(activation.saved(ScaledActivation::kInput));
    const auto& scales = activation.saved(ScaledActivation::kScales);
    auto z = matrix_of(down.saved(GroupedLinear::kInput));
    if (!z.defined() && down_->needs_weight_grad(down))
      z = kernels::scaled_activation_forward(activation_->act(), h, scales);
    const auto dz = down_->differentiate(down, down_->prepare_output_gradient(down, dy, ctx.params(down_.index)),
                                         ctx.params(down_.index), z);
    z.reset();
    if (!dz.defined()) return {};
    auto [dh, ds] = kernels::scaled_activation_backward(activation_->act(), dz, h, scales,
                                                        activation.needs_input_grad(), activation.needs_extra_grad(0));
    if (ds.defined()) activation.set_extra_input_grad(0, std::move(ds));
    if (!dh.defined()) return {};
    const auto dx = up_->differentiate(up, dh, ctx.params(up_.index), up.saved(GroupedLinear::kInput));
    return up_->finish_input_gradient(up, dx, dy);
  }

 private:
  static at::Tensor matrix_of(const at::Tensor& saved) { return saved.defined() ? ops::as_matrix(saved) : saved; }

  /// Raises if a buffer is passed for a tensor between the two linears.
  static void reject_buffers(const ops::OpContext& up, const ops::OpContext& down) {
    TORCH_CHECK_VALUE(!up.buffers() || !up.buffers()->output.defined(),
                      "buffer 'output' was passed for the first linear of a fused grouped MLP, whose "
                      "output is internal. Pass it for the last linear.");
    TORCH_CHECK_VALUE(!down.buffers() || !down.buffers()->grad_input.defined(),
                      "buffer 'grad_input' was passed for the last linear of a fused grouped MLP, whose "
                      "input is internal. Pass it for the first linear.");
  }

  MatchedOp<GroupedLinear> up_;
  MatchedOp<ScaledActivation> activation_;
  MatchedOp<GroupedLinear> down_;
};

std::string reject(const Match& m, const PlanView& view) {
  const auto& up = m.find<GroupedLinear>()->options();
  const auto& down = m.find<GroupedLinear>(1)->options();
  const auto& act = m.get<ScaledActivation>().act();
  if (up.num_groups != down.num_groups)
    return "num_groups of the linears differ: " + std::to_string(up.num_groups) + " and " +
           std::to_string(down.num_groups);
  const auto expected = down.in_features * (act.gated() ? 2 : 1);
  if (up.out_features != expected)
    return "out_features of the first linear is " + std::to_string(up.out_features) + ", the last linear needs " +
           std::to_string(expected);
  return reject_mixed_dtypes(m, view, 0, m.size() - 1);
}

std::vector<ops::OpPtr> sample() {
  return {
      std::make_shared<GroupedLinear>(GroupedLinear::Options{.num_groups = 3, .in_features = 8, .out_features = 12}),
      std::make_shared<ops::ScaledSwiGLU>(ops::ScaledSwiGLU::Options{}),
      std::make_shared<GroupedLinear>(
          GroupedLinear::Options{.num_groups = 3, .in_features = 6, .out_features = 4, .scale_bias = true})};
}

}  // namespace

PatternRule joint_grouped_mlp() {
  return {.name = "grouped_mlp",
          .pattern = {one<GroupedLinear>(), one<ScaledActivation>(), one<GroupedLinear>()},
          .reject = reject,
          .make = make_fused<GroupedMlp>(),
          .sample = sample};
}

}  // namespace weft::fused
