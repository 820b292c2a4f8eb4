#include "weft/fused/epilogues.h"
#include "weft/ops/activation.h"
#include "weft/ops/bias.h"

namespace weft::fused {
namespace {

/// y = act(x Wᵀ + b) in one GEMM, which also stores the pre-activation if backward needs it.
class LinearBiasActivation final : public FusedOp {
 public:
  explicit LinearBiasActivation(const Match& match)
      : linear_(match.find<ops::BasicLinear>()),
        bias_(match.find<ops::Bias>()),
        activation_(match.find<ops::ActivationOp>()) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto linear = ctx.op(0), activation = ctx.op(activation_.index);
    kernels::Epilogue epilogue{
        .bias = bias_of(ctx, bias_), .act = activation_->act(), .keep_pre_act = activation.needs_input_grad()};
    auto result = linear_->forward_gemm(linear, x, ctx.params(0)[0], std::move(epilogue));
    if (activation.needs_input_grad()) activation.save(ops::ActivationOp::kInput, std::move(result.pre_act));
    return result.out;
  }

 private:
  MatchedOp<ops::BasicLinear> linear_;
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ActivationOp> activation_;
};

std::string reject(const Match& m, const PlanView& view) {
  const auto& linear = m.get<ops::BasicLinear>();
  if (auto reason = reject_reduced_output(linear); !reason.empty()) return reason;
  auto reason = reject_activation(m.get<ops::ActivationOp>(), linear.local_out_features());
  return reason.empty() ? reject_mixed_dtypes(m, view, 0, m.size() - 1) : reason;
}

}  // namespace

FusionRule forward_linear_bias_activation() {
  return {.name = "linear_bias_activation",
          .pass = Pass::forward,
          .pattern = {one<ops::BasicLinear>(), maybe<ops::Bias>(), one<ops::ActivationOp>()},
          .reject = reject,
          .make = make_fused<LinearBiasActivation>,
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 8, .out_features = 8}),
                    std::make_shared<ops::Bias>(ops::Bias::Options{.size = 8}),
                    std::make_shared<ops::Activation>(ops::Activation::Options{.kind = kernels::ActKind::geglu})};
          }};
}

}  // namespace weft::fused
