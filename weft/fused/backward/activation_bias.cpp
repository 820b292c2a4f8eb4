#include "weft/fused/rule.h"
#include "weft/ops/activation.h"
#include "weft/ops/bias.h"

namespace weft::fused {
namespace {

/// dx = dy·act'(x) and db = Σ_rows dx in one pass.
class ActivationBias final : public FusedOp {
 public:
  explicit ActivationBias(const Match& match)
      : bias_(match.find<ops::Bias>()), activation_(match.find<ops::ActivationOp>()) {}

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    const auto& dy = grad.value;
    auto bias = ctx.op(0), activation = ctx.op(1);
    if (!activation.needs_input_grad()) return {};
    const auto& x = activation.saved(ops::ActivationOp::kInput);
    if (!bias.needs_param_grad(0)) return kernels::activation_backward(activation_->act(), dy, x);
    auto [dx, db] = kernels::activation_backward_column_sums(activation_->act(), dy, x);
    bias_->set_gradient(bias, std::move(db));
    return bias.needs_input_grad() ? dx : at::Tensor{};
  }

 private:
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ActivationOp> activation_;
};

}  // namespace

FusionRule backward_activation_bias() {
  return {.name = "activation_bias",
          .pass = Pass::backward,
          .pattern = {one<ops::Bias>(), one<ops::ActivationOp>()},
          .reject = [](const Match& m, const PlanView& view) -> std::string {
            return view.plans[m.first()].needs_param_grad[0] ? "" : "the bias needs no gradient";
          },
          .make = make_fused<ActivationBias>,
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::Bias>(ops::Bias::Options{.size = 8}),
                    std::make_shared<ops::GELU>(ops::GELU::Options{})};
          },
          .min_rows = 16};
}

}  // namespace weft::fused
