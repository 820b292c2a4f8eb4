#include "weft/fused/rule.h"
#include "weft/ops/basic_linear.h"
#include "weft/ops/bias.h"

namespace weft::fused {
namespace {

/// y = x Wᵀ + b in one GEMM.
class LinearBias final : public FusedOp {
 public:
  explicit LinearBias(const Match& match) : linear_(match.op(0)) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto linear = ctx.op(0);
    return static_cast<const ops::BasicLinear&>(*linear_)
        .product(linear, x, ctx.params(0)[0], {.bias = ctx.params(1)[0]})
        .out;
  }

 private:
  ops::OpPtr linear_;
};

}  // namespace

FusionRule forward_linear_bias() {
  return {.name = "linear_bias",
          .pass = Pass::forward,
          .pattern = {one<ops::BasicLinear>(), one<ops::Bias>()},
          .refuse = [](const Match& m, const PlanView& view) -> std::string {
            const auto linear = view.compute_dtypes[m.first()], sum = view.compute_dtypes[m.first() + 1];
            if (linear == sum) return {};
            return "the product is " + std::string(dtype_name(linear)) + " and the sum " + std::string(dtype_name(sum));
          },
          .make = make_fused<LinearBias>,
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 8, .out_features = 4}),
                    std::make_shared<ops::Bias>(ops::Bias::Options{.size = 4})};
          },
          .rewrite = {}};
}

}  // namespace weft::fused
