#include "weft/fused/rule.h"
#include "weft/ops/basic_linear.h"
#include "weft/ops/constant_scale.h"

namespace weft::fused {
namespace {

/// dx = s·dy W and dW = s·dyᵀ x: the scale goes into the GEMMs, dy stays as it is.
class LinearScale final : public FusedOp {
 public:
  explicit LinearScale(const Match& match)
      : linear_(match.find<ops::BasicLinear>()), scale_(match.get<ops::ConstantScale>().options().scale) {}

  at::Tensor backward(StepContext& ctx, const at::Tensor& dy) const override {
    auto linear = ctx.op(0);
    linear_->weight_gradient(linear, dy, scale_);
    return linear_->input_gradient(linear, dy, ctx.params(0), {.scale = scale_}).out;
  }

 private:
  Part<ops::BasicLinear> linear_;
  double scale_;
};

}  // namespace

FusionRule backward_linear_scale() {
  return {.name = "linear_scale",
          .pass = Pass::backward,
          .pattern = {one<ops::BasicLinear>(), one<ops::ConstantScale>()},
          .refuse = {},
          .make = make_fused<LinearScale>,
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 8, .out_features = 4}),
                    std::make_shared<ops::ConstantScale>(ops::ConstantScale::Options{.scale = -2.5})};
          },
          .rewrite = {}};
}

}  // namespace weft::fused
