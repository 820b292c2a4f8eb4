#include "weft/fused/epilogues.h"
#include "weft/ops/activation.h"
#include "weft/ops/bias.h"

namespace weft::fused {
namespace {

/// y = act(x Wᵀ + b), with b and act if present, in one GEMM, which also stores the pre-activation if backward needs
/// it.
class LinearBiasActivation final : public ForwardFusion {
 public:
  explicit LinearBiasActivation(const Match& match)
      : linear_(match.find<ops::BasicLinear>()),
        bias_(match.find<ops::Bias>()),
        activation_(match.find<ops::ActivationOp>()) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto linear = ctx.op(0);
    return save_pre_act(ctx, activation_,
                        linear_->forward_gemm(linear, x, ctx.params(0)[0], bias_activation(ctx, bias_, activation_)));
  }

 private:
  MatchedOp<ops::BasicLinear> linear_;
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ActivationOp> activation_;
};

std::string reject(const Match& m, const PlanView& view) {
  const auto& linear = m.get<ops::BasicLinear>();
  return first_reason({reject_reduced_output(linear),
                       reject_activation(m.find<ops::ActivationOp>(), linear.local_out_features()),
                       reject_mixed_dtypes(m, view, 0, m.size() - 1)});
}

std::vector<ops::OpPtr> sample() {
  return {std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 8, .out_features = 8}),
          std::make_shared<ops::Bias>(ops::Bias::Options{.size = 8})};
}

}  // namespace

PatternRule forward_linear_bias() {
  return {.name = "linear_bias",
          .pattern = {one<ops::BasicLinear>(), one<ops::Bias>()},
          .reject = reject,
          .make = make_fused<LinearBiasActivation>(),
          .sample = sample,
          .quantized = true};
}

PatternRule forward_linear_bias_activation() {
  return {.name = "linear_bias_activation",
          .pattern = {one<ops::BasicLinear>(), maybe<ops::Bias>(), one<ops::ActivationOp>()},
          .reject = reject,
          .make = make_fused<LinearBiasActivation>(),
          .sample =
              [] {
                auto list = sample();
                list.push_back(
                    std::make_shared<ops::Activation>(ops::Activation::Options{.kind = kernels::ActKind::geglu}));
                return list;
              },
          .quantized = true};
}

}  // namespace weft::fused
