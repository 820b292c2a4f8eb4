#include "weft/fused/epilogues.h"
#include "weft/ops/bias.h"

namespace weft::fused {
namespace {

/// y = x Wᵀ + b in one GEMM.
class LinearBias final : public ForwardFusion {
 public:
  explicit LinearBias(const Match& match) : linear_(match.find<ops::BasicLinear>()) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto linear = ctx.op(0);
    return linear_->forward_gemm(linear, x, ctx.params(0)[0], {.bias = ctx.params(1)[0]}).out;
  }

 private:
  MatchedOp<ops::BasicLinear> linear_;
};

}  // namespace

PatternRule forward_linear_bias() {
  return {.name = "linear_bias",
          .pattern = {one<ops::BasicLinear>(), one<ops::Bias>()},
          .reject = [](const Match& m, const PlanView& view) -> std::string {
            auto reason = reject_reduced_output(m.get<ops::BasicLinear>());
            return reason.empty() ? reject_mixed_dtypes(m, view, 0, 1) : reason;
          },
          .make = make_fused<LinearBias>(),
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 8, .out_features = 4}),
                    std::make_shared<ops::Bias>(ops::Bias::Options{.size = 4})};
          }};
}

}  // namespace weft::fused
