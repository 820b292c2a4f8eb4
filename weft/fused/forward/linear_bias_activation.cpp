#include "weft/fused/epilogues.h"
#include "weft/ops/activation.h"
#include "weft/ops/bias.h"

namespace weft::fused {
namespace {

/// y = act(x Wᵀ + b) in one GEMM, which also keeps x Wᵀ + b if backward needs it.
class LinearBiasActivation final : public FusedOp {
 public:
  explicit LinearBiasActivation(const Match& match)
      : linear_(match.find<ops::BasicLinear>()),
        bias_(match.find<ops::Bias>()),
        activation_(match.find<ops::ActivationOp>()) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto linear = ctx.op(0), activation = ctx.op(activation_.at);
    kernels::Epilogue epilogue{
        .bias = bias_of(ctx, bias_), .act = activation_->act(), .keep_pre = activation.input_wanted()};
    auto result = linear_->product(linear, x, ctx.params(0)[0], std::move(epilogue));
    if (activation.input_wanted()) activation.save(ops::ActivationOp::kInput, std::move(result.pre));
    return result.out;
  }

 private:
  Part<ops::BasicLinear> linear_;
  Part<ops::Bias> bias_;
  Part<ops::ActivationOp> activation_;
};

std::string refuse(const Match& m, const PlanView& view) {
  const auto& linear = m.get<ops::BasicLinear>();
  if (auto reason = refuse_summed_output(linear); !reason.empty()) return reason;
  auto reason = refuse_activation(m.get<ops::ActivationOp>(), linear.local_out());
  return reason.empty() ? refuse_mixed_dtypes(m, view, 0, m.size() - 1) : reason;
}

}  // namespace

FusionRule forward_linear_bias_activation() {
  return {.name = "linear_bias_activation",
          .pass = Pass::forward,
          .pattern = {one<ops::BasicLinear>(), maybe<ops::Bias>(), one<ops::ActivationOp>()},
          .refuse = refuse,
          .make = make_fused<LinearBiasActivation>,
          .sample = []() -> std::vector<ops::OpPtr> {
            return {
                std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 8, .out_features = 8}),
                std::make_shared<ops::Bias>(ops::Bias::Options{.size = 8}),
                std::make_shared<ops::GatedActivation>(ops::GatedActivation::Options{.kind = kernels::ActKind::geglu})};
          },
          .rewrite = {}};
}

}  // namespace weft::fused
