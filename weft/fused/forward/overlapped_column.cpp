#include <c10/util/accumulate.h>

#include "weft/fused/overlapped.h"

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
        group_(match) {
    if (!reject_activation(activation_, linear_->local_out_features()).empty()) std::swap(activation_, separate_);
  }

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto y = save_pre_act(ctx, activation_, forward_gemm(ctx, x, bias_activation(ctx, bias_, activation_)));
    if (!separate_) return y;
    auto activation = ctx.op(separate_.index);
    return separate_->forward(activation, y, {});
  }

 private:
  kernels::GemmResult forward_gemm(StepContext& ctx, const at::Tensor& x, kernels::Epilogue epilogue) const {
    auto linear = ctx.op(0);
    const auto& weight = ctx.params(0)[0];
    OverlappedCall call(ctx, group_);
    const auto rows = c10::multiply_integers(x.sizes().slice(0, std::max<int64_t>(x.dim(), 1) - 1));
    auto* transport = call.all_gather(linear.dtype(weight.scalar_type()), rows, linear_->local_out_features(),
                                      linear_->local_in_features());
    return linear_->forward_gemm(linear, x, weight, std::move(epilogue), transport);
  }

  MatchedOp<ops::BasicLinear> linear_;
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ActivationOp> activation_, separate_;  // in the GEMM's epilogue, or after it
  LinearGroup group_;
};

std::string reject(const Match& m, const PlanView& view) {
  if (!m.get<ops::BasicLinear>().gathers_input()) return "no communication in forward without sequence_parallel";
  return first_reason({reject_overlap(m, view), reject_mixed_dtypes(m, view, 0, m.size() - 1)});
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
