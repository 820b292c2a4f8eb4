#include "weft/fused/epilogues.h"
#include "weft/ops/bias.h"
#include "weft/ops/constant_scale.h"

namespace weft::fused {
namespace {

/// y = e + (x Wᵀ + b), or y = e + s·x Wᵀ, in one GEMM, where e is the extra input. Written into e if AddExtraInput is
/// in_place and e is not referenced elsewhere.
class LinearAdd final : public ForwardFusion {
 public:
  explicit LinearAdd(const Match& match)
      : linear_(match.find<ops::BasicLinear>()),
        bias_(match.find<ops::Bias>()),
        scale_(match.find<ops::ConstantScale>()),
        join_(match.find<ops::AddExtraInput>()) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto linear = ctx.op(0), join = ctx.op(join_.index);
    const auto& weight = ctx.params(0)[0];
    kernels::Epilogue epilogue{.bias = bias_of(ctx, bias_)};
    if (scale_) epilogue.scale = scale_->options().scale;
    add_extra_input(epilogue, *join_.op, join, x, weight.size(0), linear.dtype(weight.scalar_type()));
    return linear_->forward_gemm(linear, x, weight, std::move(epilogue)).out;
  }

 private:
  MatchedOp<ops::BasicLinear> linear_;
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ConstantScale> scale_;
  MatchedOp<ops::AddExtraInput> join_;
};

std::string reject(const Match& m, const PlanView& view) {
  const auto& linear = m.get<ops::BasicLinear>();
  if (auto reason = reject_reduced_output(linear); !reason.empty()) return reason;
  if (linear.gathers_input()) return "x holds only this rank's rows, the extra input the rows of all ranks";
  return reject_mixed_dtypes(m, view, 0, m.size() - 2);  // AddExtraInput promotes, so its dtype may differ
}

/// The rule for BasicLinear, `middle`, AddExtraInput.
PatternRule rule(std::string name, Element middle, const ops::OpPtr& sample) {
  return {.name = std::move(name),
          .pattern = {one<ops::BasicLinear>(), std::move(middle), one<ops::AddExtraInput>()},
          .reject = reject,
          .make = make_fused<LinearAdd>(),
          .sample = [sample]() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 8, .out_features = 4}),
                    sample, std::make_shared<ops::AddExtraInput>(ops::AddExtraInput::Options{.in_place = true})};
          },
          .quantized = true};
}

}  // namespace

PatternRule forward_linear_bias_add() {
  return rule("linear_bias_add", maybe<ops::Bias>(), std::make_shared<ops::Bias>(ops::Bias::Options{.size = 4}));
}

PatternRule forward_linear_scale_add() {
  return rule("linear_scale_add", one<ops::ConstantScale>(),
              std::make_shared<ops::ConstantScale>(ops::ConstantScale::Options{.scale = -2.5}));
}

}  // namespace weft::fused
