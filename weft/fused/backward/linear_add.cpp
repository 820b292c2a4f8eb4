#include "weft/fused/epilogues.h"
#include "weft/ops/make_extra_output.h"

namespace weft::fused {
namespace {

/// dx = dy W + g in one GEMM, where g is the gradient of the extra output. Written into g if MakeExtraOutput is
/// in_place and g is not referenced elsewhere.
class LinearAddBackward final : public BackwardFusion {
 public:
  explicit LinearAddBackward(const Match& match)
      : fork_(match.find<ops::MakeExtraOutput>()), linear_(match.find<ops::BasicLinear>()) {}

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    auto fork = ctx.op(0), linear = ctx.op(1);
    auto g = fork.take_extra_output_grad(0);
    if (!grad.value.defined()) return g;
    const auto dy = linear_->prepare_output_gradient(linear, grad, ctx.params(1));
    linear_->weight_gradient(linear, dy);
    if (!linear.needs_input_grad()) return {};
    kernels::Epilogue epilogue;
    set_addend(epilogue, g, fork_->in_place(), linear.dtype(ctx.params(1)[0].scalar_type()));
    return linear_->input_gradient(linear, dy, ctx.params(1), std::move(epilogue)).out;
  }

 private:
  MatchedOp<ops::MakeExtraOutput> fork_;
  MatchedOp<ops::BasicLinear> linear_;
};

}  // namespace

PatternRule backward_linear_add() {
  return {.name = "linear_add",
          .pattern = {one<ops::MakeExtraOutput>(), one<ops::BasicLinear>()},
          .reject = [](const Match& m, const PlanView& view) -> std::string {
            if (!view.plans[m.first()].needs_input_grad) return "the input needs no gradient";
            return reject_reduced_gradient(m.get<ops::BasicLinear>());
          },
          .make = make_fused<LinearAddBackward>(),
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::MakeExtraOutput>(ops::MakeExtraOutput::Options{.in_place = true}),
                    std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 8, .out_features = 4})};
          },
          .quantized = true};
}

}  // namespace weft::fused
