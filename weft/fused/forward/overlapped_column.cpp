#include "weft/fused/overlapped.h"
#include "weft/ops/leading_dims.h"
#include "weft/overlap/schedules.h"
#include "weft/quant/recipe.h"

namespace weft::fused {
namespace {

/// y = act(all_gather(x) Wᵀ + b). The GEMM multiplies the rows of other ranks as they arrive. If a recipe quantizes the
/// linear, ranks send codes and scales.
class OverlappedColumn final : public ForwardFusion {
 public:
  explicit OverlappedColumn(const Match& match)
      : linear_(match.find<ops::BasicLinear>()),
        bias_(match.find<ops::Bias>()),
        activation_(match.find<ops::ActivationOp>()),
        group_(match) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    if (!ctx.op(0).plan().recipe)
      return save_pre_act(ctx, activation_, forward_gemm(ctx, x, bias_activation(ctx, bias_, activation_)));
    auto y = forward_gemm(ctx, x, {.bias = bias_of(ctx, bias_)}).out;
    if (!activation_) return y;
    auto activation = ctx.op(activation_.index);  // a quantized GEMM does not apply it
    return activation_->forward(activation, y, {});
  }

 private:
  kernels::GemmResult forward_gemm(StepContext& ctx, const at::Tensor& x, kernels::Epilogue epilogue) const {
    auto linear = ctx.op(0);
    const auto& weight = ctx.params(0)[0];
    OverlappedCall call(ctx, group_);
    auto* transport = call.all_gather_input(linear, *linear_.op, x, linear.dtype(weight.scalar_type()));
    return linear_->forward_gemm(linear, x, weight, std::move(epilogue), transport);
  }

  MatchedOp<ops::BasicLinear> linear_;
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ActivationOp> activation_;
  LinearGroup group_;
};

std::string reject_recipe(const PlanView& view) {
  const auto* recipe = quant::find_recipe(view.key.recipe());
  if (!recipe || kernels::multiplies_in_chunks(recipe->input.quantization())) return {};
  return "the recipe quantizes the input in blocks that span rows, or with float32 scales that are not powers of two";
}

std::string reject(const Match& m, const PlanView& view) {
  const auto& linear = m.get<ops::BasicLinear>();
  if (!linear.gathers_input()) return "no communication in forward without sequence_parallel";
  return first_reason({reject_overlap(m, view), reject_recipe(view),
                       reject_activation(m.find<ops::ActivationOp>(), linear.local_out_features()),
                       reject_mixed_dtypes(m, view, 0, m.size() - 1)});
}

}  // namespace

PatternRule forward_overlapped_column() {
  return {.name = "overlapped_column",
          .pattern = {column_linear(), maybe<ops::Bias>(), maybe<ops::ActivationOp>()},
          .reject = reject,
          .make = make_fused<OverlappedColumn>(),
          .quantized = true};
}

}  // namespace weft::fused
