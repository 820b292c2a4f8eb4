#include <ATen/ops/add.h>

#include "weft/fused/epilogues.h"
#include "weft/ops/activation.h"
#include "weft/ops/bias.h"
#include "weft/ops/make_extra_output.h"
#include "weft/ops/norm.h"
#include "weft/ops/rows.h"
#include "weft/tensor/ownership.h"

namespace weft::fused {
namespace {

using ops::ActivationOp;
using ops::BasicLinear;

/// y = e + W2 h + b2,  h = act(p),  p = W1 n + b1,  n = norm(x), with e = x if a channel leads from the fork to the
/// join. Keeps x, the statistics of its rows and p. Backward computes h again inside the GEMM that gives dp, and n by
/// the norm's kernel. What nothing before it wants a gradient for is kept instead: n if the norm owes none, h if p is
/// not needed. Narrow blocks keep both: their GEMMs are too short for anything to be computed again beside them.
class MlpBlock final : public FusedOp {
  static constexpr int64_t kNarrow = 256;

 public:
  explicit MlpBlock(const Match& m)
      : fork_(m.find<ops::MakeExtraOutput>()),
        norm_(m.find<ops::NormOp>()),
        up_(m.find<BasicLinear>()),
        activation_(m.find<ActivationOp>()),
        down_(m.find<BasicLinear>(activation_.at)),
        up_bias_(m.find<ops::Bias>()),
        down_bias_(m.find<ops::Bias>(activation_.at)),
        join_(m.find<ops::AddExtraInput>()) {
    if (up_bias_.at > activation_.at) up_bias_ = {};
    fork_read_outside_ = fork_ && m.wire(fork_.at).outside;
    residual_ = fork_ && join_ && m.wire(join_.at).from == fork_.at;
    narrow_ = std::min(up_->options().in_features, up_->options().out_features) < kNarrow;
  }

  bool routes_inner_channels() const override { return true; }
  bool reads(int part, int) const override { return part == norm_.at; }
  bool fills(const ops::OpPlan* plans, int part, int slot) const override {
    if (part == up_.at && slot == BasicLinear::kInput) return narrow_ || !plans[norm_.at].records;
    if (part == down_.at && slot == BasicLinear::kInput) return narrow_ || !plans[activation_.at].input_wanted;
    return true;
  }

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto norm = ctx.op(norm_.at), up = ctx.op(up_.at), activation = ctx.op(activation_.at), down = ctx.op(down_.at);
    if (fork_read_outside_) ctx.op(fork_.at).set_extra_output(0, x);

    const auto n = norm_->forward(norm, x, ctx.params(norm_.at));
    auto middle = up_->product(
        up, n, ctx.params(up_.at)[0],
        {.bias = bias_of(ctx, up_bias_), .act = activation_->act(), .keep_pre = activation.input_wanted()});
    if (norm.records() && !narrow_) up.save(BasicLinear::kInput, {});
    if (activation.input_wanted()) activation.save(ActivationOp::kInput, std::move(middle.pre));

    kernels::Epilogue epilogue{.bias = bias_of(ctx, down_bias_)};
    const auto& weight = ctx.params(down_.at)[0];
    if (join_) {
      auto join = ctx.op(join_.at);
      if (residual_) join.frame().extra_in[join.plan().extra_in_base] = x;
      add_extra_input(epilogue, *join_.op, join, middle.out, weight.size(0), middle.out.scalar_type());
    }
    if (!narrow_) write_over(epilogue, n, weight.size(0));
    auto y = down_->product(down, middle.out, weight, std::move(epilogue)).out;
    if (activation.input_wanted() && !narrow_) down.save(BasicLinear::kInput, {});
    return y;
  }

  at::Tensor backward(StepContext& ctx, const at::Tensor& dy) const override {
    auto g = fork_ ? ctx.op(fork_.at).take_extra_output_grad(0) : at::Tensor{};
    if (!dy.defined()) return g;
    if (join_ && !residual_ && ctx.op(join_.at).extra_wanted(0)) ctx.op(join_.at).set_extra_input_grad(0, dy);
    if (down_bias_ && ctx.op(down_bias_.at).param_wanted(0))
      down_bias_->set_gradient(ctx.op(down_bias_.at), ops::sum_rows(dy));

    const auto dp = through_activation(ctx, dy);
    if (!dp.defined()) return {};
    const auto dn = gradients_behind_norm(ctx, up_, norm_, dp);
    if (!dn.defined()) return {};
    auto norm = ctx.op(norm_.at);
    auto dx = norm_->gradient(norm, dn, ctx.params(norm_.at), residual_ ? dy : g, sole_owner(dn));
    return residual_ && dx.defined() && g.defined() ? at::add(g, dx) : dx;
  }

 private:
  /// dp = (dy W2)·act'(p), in tiles too for dW1; dW2 = dyᵀ h, db1 = Σ_rows dp.
  at::Tensor through_activation(StepContext& ctx, const at::Tensor& dy) const {
    auto activation = ctx.op(activation_.at), down = ctx.op(down_.at);
    const auto& p = activation.saved(ActivationOp::kInput);
    const bool sums = up_bias_ && ctx.op(up_bias_.at).param_wanted(0);
    auto h = down.saved(BasicLinear::kInput);
    const bool h_again = down.param_wanted(0) && !h.defined();
    kernels::GemmResult result;
    if (down.input_wanted())
      result = down_->input_gradient(down, dy, ctx.params(down_.at),
                                     {.slope = activation_->act(),
                                      .at = ops::as_matrix(p),
                                      .keep_again = h_again,
                                      .keep_sums = sums,
                                      .keep_tiles = up_->takes_tiles(ctx.op(up_.at), dy)});
    if (h_again) h = result.again.defined() ? result.again : kernels::activation_forward(activation_->act(), p);
    down_->weight_gradient_of(down, dy, h);
    if (sums) up_bias_->set_gradient(ctx.op(up_bias_.at), std::move(result.sums));
    hand_over(ctx, result);
    return result.out;
  }

  Part<ops::MakeExtraOutput> fork_;
  Part<ops::NormOp> norm_;
  Part<BasicLinear> up_;
  Part<ActivationOp> activation_;
  Part<BasicLinear> down_;
  Part<ops::Bias> up_bias_, down_bias_;
  Part<ops::AddExtraInput> join_;
  bool fork_read_outside_ = false, residual_ = false, narrow_ = false;
};

std::string refuse(const Match& m, const PlanView& view) {
  const auto norm = m.find<ops::NormOp>();
  const auto up = m.find<BasicLinear>();
  for (const auto& linear : {up, m.find<BasicLinear>(up.at + 1)})
    if (auto reason = refuse_parallel(*linear.op); !reason.empty()) return reason;
  auto reason = refuse_activation(m.get<ActivationOp>(), up->options().out_features);
  const int last = m.size() - (m.find<ops::AddExtraInput>() ? 2 : 1);
  return reason.empty() ? refuse_mixed_dtypes(m, view, norm.at, last) : reason;
}

std::vector<ops::OpPtr> sample() {
  return {std::make_shared<ops::RMSNorm>(ops::NormOptions{.normalized_shape = {8}}),
          std::make_shared<BasicLinear>(BasicLinear::Options{.in_features = 8, .out_features = 12}),
          std::make_shared<ops::Bias>(ops::Bias::Options{.size = 12}),
          std::make_shared<ops::GatedActivation>(ops::GatedActivation::Options{.kind = kernels::ActKind::geglu}),
          std::make_shared<BasicLinear>(BasicLinear::Options{.in_features = 6, .out_features = 4}),
          std::make_shared<ops::Bias>(ops::Bias::Options{.size = 4}),
          std::make_shared<ops::AddExtraInput>(ops::AddExtraInput::Options{})};
}

}  // namespace

FusionRule joint_mlp_block() {
  return {.name = "mlp_block",
          .pass = Pass::joint,
          .pattern = {maybe<ops::MakeExtraOutput>(), one<ops::NormOp>(), one<BasicLinear>(), maybe<ops::Bias>(),
                      one<ActivationOp>(), one<BasicLinear>(), maybe<ops::Bias>(), maybe<ops::AddExtraInput>()},
          .refuse = refuse,
          .make = make_fused<MlpBlock>,
          .sample = sample,
          .rewrite = {}};
}

}  // namespace weft::fused
