#include <ATen/ops/add.h>

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

/// y = e + W2 h + b2,  h = act(p),  p = W1 n + b1,  n = norm(x), with e = x if a channel connects the fork to the join.
/// Saves x, its row statistics and p. Backward recomputes h in the epilogue of the dp GEMM, and n with the norm kernel.
/// Saves n instead of x if the norm needs no gradient, and h instead of p if p needs none. Narrow blocks save n and h
/// in addition: their GEMMs are too short to hide the recomputation.
class MlpBlock final : public JointFusion {
  static constexpr int64_t kNarrow = 256;

 public:
  explicit MlpBlock(const Match& m)
      : fork_(m.find<ops::MakeExtraOutput>()),
        norm_(m.find<ops::NormOp>()),
        up_(m.find<BasicLinear>()),
        activation_(m.find<ActivationOp>()),
        down_(m.find<BasicLinear>(activation_.index)),
        up_bias_(m.find<ops::Bias>()),
        down_bias_(m.find<ops::Bias>(activation_.index)),
        join_(m.find<ops::AddExtraInput>()) {
    if (up_bias_.index > activation_.index) up_bias_ = {};
    fork_read_outside_ = fork_ && m.wire(fork_.index).outside;
    residual_ = fork_ && join_ && m.wire(join_.index).from == fork_.index;
    narrow_ = std::min(up_->options().in_features, up_->options().out_features) < kNarrow;
  }

  bool routes_inner_channels() const override { return true; }
  bool reads_param(int index, int) const override { return index == norm_.index; }
  bool reads_saved(const ops::OpPlan* plans, int index, int slot) const override {
    if (slot != BasicLinear::kInput || (index != up_.index && index != down_.index)) return true;
    const bool recomputes =
        index == up_.index ? plans[norm_.index].needs_grad : plans[activation_.index].needs_input_grad;
    return narrow_ || !recomputes || !BasicLinear::takes_recomputed_input(plans[index]);
  }

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto norm = ctx.op(norm_.index), up = ctx.op(up_.index), down = ctx.op(down_.index);
    if (fork_read_outside_) ctx.op(fork_.index).set_extra_output(0, x);

    const auto n = norm_->forward(norm, x, ctx.params(norm_.index));
    const auto h =
        save_pre_act(ctx, activation_,
                     up_->forward_gemm(up, n, ctx.params(up_.index)[0], bias_activation(ctx, up_bias_, activation_)));

    kernels::Epilogue epilogue{.bias = bias_of(ctx, down_bias_)};
    const auto& weight = ctx.params(down_.index)[0];
    if (join_) {
      auto join = ctx.op(join_.index);
      if (residual_) join.set_extra_input(0, x);
      add_extra_input(epilogue, *join_.op, join, h, weight.size(0), h.scalar_type());
    }
    if (!narrow_) reuse_memory(epilogue, n, weight.size(0));
    return down_->forward_gemm(down, h, weight, std::move(epilogue)).out;
  }

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    const auto& dy = grad.value;
    auto g = fork_ ? ctx.op(fork_.index).take_extra_output_grad(0) : at::Tensor{};
    if (!dy.defined()) return g;
    if (join_ && !residual_ && ctx.op(join_.index).needs_extra_grad(0)) ctx.op(join_.index).set_extra_input_grad(0, dy);
    if (down_bias_ && ctx.op(down_bias_.index).needs_param_grad(0))
      down_bias_->set_gradient(ctx.op(down_bias_.index), ops::sum_rows(dy));

    const auto dp = through_activation(ctx, grad);
    if (!dp.value.defined()) return {};
    const auto dn = linear_gradients_after_norm(ctx, up_, norm_, dp);
    if (!dn.defined()) return {};
    auto norm = ctx.op(norm_.index);
    auto dx = norm_->gradient(norm, dn, ctx.params(norm_.index), residual_ ? dy : g, sole_owner(dn));
    return residual_ && dx.defined() && g.defined() ? at::add(g, dx) : dx;
  }

 private:
  /// dp = (dy W2)·act'(p), also packed for the dW1 GEMM;  dW2 = dyᵀ h,  db1 = Σ_rows dp.
  ops::Gradient through_activation(StepContext& ctx, const ops::Gradient& grad) const {
    const auto& dy = grad.value;
    auto activation = ctx.op(activation_.index), down = ctx.op(down_.index);
    const auto& p = activation.saved(ActivationOp::kInput);
    const bool needs_db = up_bias_ && ctx.op(up_bias_.index).needs_param_grad(0);
    const bool recompute_h = down.needs_param_grad(0) && !down.saved(BasicLinear::kInput).defined();
    const auto gradient = down_->prepare_output_gradient(down, grad, ctx.params(down_.index));
    kernels::GemmResult result;
    if (down.needs_input_grad())
      result = down_->input_gradient(down, gradient, ctx.params(down_.index),
                                     {.act_grad = activation_->act(),
                                      .act_input = ops::as_matrix(p),
                                      .keep_act_output = recompute_h,
                                      .keep_column_sums = needs_db,
                                      .keep_packed_transpose = up_->uses_packed_dy(ctx.op(up_.index).plan(), dy)});
    if (recompute_h)
      down_->weight_gradient_of(
          down, gradient,
          result.act_output.defined() ? result.act_output : kernels::activation_forward(activation_->act(), p));
    else
      down_->weight_gradient(down, gradient);
    if (needs_db) up_bias_->set_gradient(ctx.op(up_bias_.index), std::move(result.column_sums));
    return {result.out, result.packed_transpose};
  }

  MatchedOp<ops::MakeExtraOutput> fork_;
  MatchedOp<ops::NormOp> norm_;
  MatchedOp<BasicLinear> up_;
  MatchedOp<ActivationOp> activation_;
  MatchedOp<BasicLinear> down_;
  MatchedOp<ops::Bias> up_bias_, down_bias_;
  MatchedOp<ops::AddExtraInput> join_;
  bool fork_read_outside_ = false, residual_ = false, narrow_ = false;
};

std::string reject(const Match& m, const PlanView& view) {
  const auto norm = m.find<ops::NormOp>();
  const auto up = m.find<BasicLinear>();
  const int last = m.size() - (m.find<ops::AddExtraInput>() ? 2 : 1);
  return first_reason({reject_parallel(*up.op), reject_parallel(*m.find<BasicLinear>(up.index + 1).op),
                       reject_activation(m.find<ActivationOp>(), up->options().out_features),
                       reject_mixed_dtypes(m, view, norm.index, last)});
}

std::vector<ops::OpPtr> sample() {
  return {std::make_shared<ops::RMSNorm>(ops::NormOptions{.normalized_shape = {8}}),
          std::make_shared<BasicLinear>(BasicLinear::Options{.in_features = 8, .out_features = 12}),
          std::make_shared<ops::Bias>(ops::Bias::Options{.size = 12}),
          std::make_shared<ops::Activation>(ops::Activation::Options{.kind = kernels::ActKind::geglu}),
          std::make_shared<BasicLinear>(BasicLinear::Options{.in_features = 6, .out_features = 4}),
          std::make_shared<ops::Bias>(ops::Bias::Options{.size = 4}),
          std::make_shared<ops::AddExtraInput>(ops::AddExtraInput::Options{})};
}

}  // namespace

PatternRule joint_mlp_block() {
  return {.name = "mlp_block",
          .pattern = {maybe<ops::MakeExtraOutput>(), one<ops::NormOp>(), one<BasicLinear>(), maybe<ops::Bias>(),
                      one<ActivationOp>(), one<BasicLinear>(), maybe<ops::Bias>(), maybe<ops::AddExtraInput>()},
          .reject = reject,
          .make = make_fused<MlpBlock>(),
          .sample = sample,
          .quantized = true};
}

}  // namespace weft::fused
