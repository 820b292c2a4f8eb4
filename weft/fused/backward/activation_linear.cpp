#include "weft/fused/epilogues.h"
#include "weft/ops/activation.h"
#include "weft/ops/bias.h"
#include "weft/ops/leading_dims.h"

namespace weft::fused {
namespace {

/// For y = h Wᵀ, h = act(p), p = x + b:  dx = (dy W)·act'(p) and db = Σ_rows dx in the GEMM epilogue, which also packs
/// dx if the next step uses it.
class ActivationLinear final : public BackwardFusion {
 public:
  explicit ActivationLinear(const Match& match)
      : bias_(match.find<ops::Bias>()),
        activation_(match.find<ops::ActivationOp>()),
        linear_(match.find<ops::BasicLinear>()) {}

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    auto activation = ctx.op(activation_.index), linear = ctx.op(linear_.index);
    const auto dy = linear_->prepare_output_gradient(linear, grad, ctx.params(linear_.index));
    linear_->weight_gradient(linear, dy);
    if (!activation.needs_input_grad()) return {};
    const bool needs_db = bias_ && ctx.op(bias_.index).needs_param_grad(0);
    auto result = linear_->input_gradient(linear, dy, ctx.params(linear_.index),
                                          {.act_grad = activation_->act(),
                                           .act_input = ops::as_matrix(activation.saved(ops::ActivationOp::kInput)),
                                           .keep_column_sums = needs_db,
                                           .keep_packed_transpose = ctx.needs_packed_dx(dy.sizes)});
    if (needs_db) bias_->set_gradient(ctx.op(bias_.index), std::move(result.column_sums));
    if (!ctx.op(0).needs_input_grad()) return {};
    return {result.out, result.packed_transpose};
  }

 private:
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ActivationOp> activation_;
  MatchedOp<ops::BasicLinear> linear_;
};

std::string reject(const Match& m, const PlanView& view) {
  const auto activation = m.find<ops::ActivationOp>();
  if (!view.plans[m.first() + activation.index].needs_input_grad)
    return "the input of the activation needs no gradient";
  const auto& linear = m.get<ops::BasicLinear>();
  return first_reason({reject_reduced_gradient(linear), reject_activation(activation, 2 * linear.local_in_features()),
                       reject_mixed_dtypes(m, view, activation.index, activation.index + 1)});
}

}  // namespace

PatternRule backward_activation_linear() {
  return {.name = "activation_linear",
          .pattern = {maybe<ops::Bias>(), one<ops::ActivationOp>(), one<ops::BasicLinear>()},
          .reject = reject,
          .make = make_fused<ActivationLinear>(),
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::Bias>(ops::Bias::Options{.size = 8}),
                    std::make_shared<ops::Activation>(ops::Activation::Options{.kind = kernels::ActKind::geglu}),
                    std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 4, .out_features = 4})};
          },
          .quantized = true};
}

}  // namespace weft::fused
