#include "weft/fused/rule.h"
#include "weft/ops/make_extra_output.h"
#include "weft/ops/norm.h"

namespace weft::fused {
namespace {

/// dx = norm_backward(dy) + g in one kernel, where g is the gradient of the extra output.
class AddNorm final : public BackwardFusion {
 public:
  explicit AddNorm(const Match& match) : norm_(match.find<ops::NormOp>()) {}

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    const auto& dy = grad.value;
    auto fork = ctx.op(0), norm = ctx.op(1);
    const auto g = fork.take_extra_output_grad(0);
    return dy.defined() ? norm_->gradient(norm, dy, ctx.params(1), g, /*reuse=*/false) : g;
  }

 private:
  MatchedOp<ops::NormOp> norm_;
};

template <class Norm>
PatternRule rule(const std::string& name) {
  return {.name = name,
          .pattern = {one<ops::MakeExtraOutput>(), one<Norm>()},
          .reject = [](const Match& m, const PlanView& view) -> std::string {
            return view.plans[m.first()].needs_input_grad ? "" : "the input needs no gradient";
          },
          .make = make_fused<AddNorm>(),
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::MakeExtraOutput>(ops::MakeExtraOutput::Options{}),
                    std::make_shared<Norm>(typename Norm::Options{.normalized_shape = {8}})};
          }};
}

}  // namespace

PatternRule backward_add_rms_norm() { return rule<ops::RMSNorm>("add_rms_norm"); }
PatternRule backward_add_layer_norm() { return rule<ops::LayerNorm>("add_layer_norm"); }

}  // namespace weft::fused
