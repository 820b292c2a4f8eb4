#include "weft/fused/epilogues.h"
#include "weft/ops/basic_linear.h"
#include "weft/ops/constant_scale.h"

namespace weft::fused {
namespace {

/// dx = s·dy W and dW = s·dyᵀ x, with the scale applied in the GEMMs instead of to dy.
class LinearScale final : public BackwardFusion {
 public:
  explicit LinearScale(const Match& match)
      : linear_(match.find<ops::BasicLinear>()), scale_(match.get<ops::ConstantScale>().options().scale) {}

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    auto linear = ctx.op(0);
    const auto dy = linear_->prepare_output_gradient(linear, grad, ctx.params(0));
    linear_->weight_gradient(linear, dy, scale_);
    return linear_->input_gradient(linear, dy, ctx.params(0), {.scale = scale_}).out;
  }

 private:
  MatchedOp<ops::BasicLinear> linear_;
  double scale_;
};

}  // namespace

PatternRule backward_linear_scale() {
  return {.name = "linear_scale",
          .pattern = {one<ops::BasicLinear>(), one<ops::ConstantScale>()},
          .reject = [](const Match& m, const PlanView&) { return reject_reduced_gradient(m.get<ops::BasicLinear>()); },
          .make = make_fused<LinearScale>(),
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 8, .out_features = 4}),
                    std::make_shared<ops::ConstantScale>(ops::ConstantScale::Options{.scale = -2.5})};
          },
          .min_rows = 16};
}

}  // namespace weft::fused
