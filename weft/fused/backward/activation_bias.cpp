#include "weft/fused/epilogues.h"
#include "weft/ops/activation.h"

namespace weft::fused {
namespace {

/// Backward of y = act(p), p = x + b: dx = dy·act'(p) and db = Σ_rows dx in one pass.
class ActivationBias final : public BackwardFusion {
 public:
  explicit ActivationBias(const Match& match)
      : bias_(match.find<ops::Bias>()), activation_(match.find<ops::ActivationOp>()) {}

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    return bias_activation_gradient(ctx, bias_, activation_, grad.value);
  }

 private:
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ActivationOp> activation_;
};

}  // namespace

PatternRule backward_activation_bias() {
  return {.name = "activation_bias",
          .pattern = {one<ops::Bias>(), one<ops::ActivationOp>()},
          .reject = [](const Match& m, const PlanView& view) -> std::string {
            if (!view.plans[m.first()].needs_param_grad[0]) return "the bias needs no gradient";
            return reject_cached_input(m.get<ops::ActivationOp>());
          },
          .make = make_fused<ActivationBias>(),
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::Bias>(ops::Bias::Options{.size = 8}),
                    std::make_shared<ops::GELU>(ops::GELU::Options{})};
          },
          .min_rows = 16};
}

}  // namespace weft::fused
