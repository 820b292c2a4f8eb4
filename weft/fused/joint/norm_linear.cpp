#include "weft/core/ownership.h"
#include "weft/fused/epilogues.h"
#include "weft/ops/activation.h"
#include "weft/ops/bias.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/make_extra_output.h"
#include "weft/ops/norm.h"

namespace weft::fused {
namespace {

using ops::ActivationOp;
using ops::BasicLinear;

/// y = act(n Wᵀ + b),  n = norm(x). Saves x and its row statistics instead of n, which backward recomputes. Saves n if
/// the norm needs no gradient. An extra output of x before the norm is part of the fusion: its gradient g is added to
/// dx.
class NormLinear final : public JointFusion {
 public:
  explicit NormLinear(const Match& m)
      : fork_(m.find<ops::MakeExtraOutput>()),
        norm_(m.find<ops::NormOp>()),
        linear_(m.find<BasicLinear>()),
        bias_(m.find<ops::Bias>()),
        activation_(m.find<ActivationOp>()) {}

  bool reads_param(int index, int) const override { return index == norm_.index; }
  bool reads_saved(const ops::OpPlan* plans, int index, int slot) const override {
    return index != linear_.index || slot != BasicLinear::kInput || !plans[norm_.index].needs_grad ||
           !BasicLinear::takes_recomputed_input(plans[linear_.index]);
  }

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto norm = ctx.op(norm_.index), linear = ctx.op(linear_.index);
    if (fork_) ctx.op(fork_.index).set_extra_output(0, x);
    const auto n = norm_->forward(norm, x, ctx.params(norm_.index));
    return save_pre_act(
        ctx, activation_,
        linear_->forward_gemm(linear, n, ctx.params(linear_.index)[0], bias_activation(ctx, bias_, activation_)));
  }

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    const auto& dy = grad.value;
    const auto g = fork_ ? ctx.op(fork_.index).take_extra_output_grad(0) : at::Tensor{};
    if (!dy.defined()) return g;
    auto norm = ctx.op(norm_.index);
    const auto dp = through_activation(ctx, dy);
    if (!dp.defined()) return {};
    const auto dn = linear_gradients_after_norm(ctx, linear_, norm_, dp);
    return dn.defined() ? norm_->gradient(norm, dn, ctx.params(norm_.index), g, sole_owner(dn)) : dn;
  }

 private:
  /// For y = act(p), p = n Wᵀ + b: returns dp = dy·act'(p), or dy without an activation, and sets db = Σ_rows dp.
  at::Tensor through_activation(StepContext& ctx, const at::Tensor& dy) const {
    if (activation_) return bias_activation_gradient(ctx, bias_, activation_, dy);
    if (bias_ && ctx.op(bias_.index).needs_param_grad(0)) bias_->set_gradient(ctx.op(bias_.index), ops::sum_rows(dy));
    return dy;
  }

  MatchedOp<ops::MakeExtraOutput> fork_;
  MatchedOp<ops::NormOp> norm_;
  MatchedOp<BasicLinear> linear_;
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ActivationOp> activation_;
};

std::string reject(const Match& m, const PlanView& view) {
  const auto& linear = m.get<BasicLinear>();
  return first_reason({reject_parallel(linear),
                       reject_activation(m.find<ActivationOp>(), linear.options().out_features),
                       reject_mixed_dtypes(m, view, m.find<ops::NormOp>().index, m.size() - 1)});
}

}  // namespace

PatternRule joint_norm_linear() {
  return {.name = "norm_linear",
          .pattern = {maybe<ops::MakeExtraOutput>(), one<ops::NormOp>(), one<BasicLinear>(), maybe<ops::Bias>(),
                      maybe<ActivationOp>()},
          .reject = reject,
          .make = make_fused<NormLinear>(),
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::LayerNorm>(ops::LayerNormOptions{.normalized_shape = {8}}),
                    std::make_shared<BasicLinear>(BasicLinear::Options{.in_features = 8, .out_features = 4}),
                    std::make_shared<ops::Bias>(ops::Bias::Options{.size = 4})};
          },
          .quantized = true,
          .opt_in = true};  // saves memory at the cost of time: backward recomputes the norm
}

}  // namespace weft::fused
