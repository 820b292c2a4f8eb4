#include "weft/fused/overlapped.h"
#include "weft/ops/leading_dims.h"
#include "weft/overlap/schedules.h"

namespace weft::fused {
namespace {

/// y = act(all_gather(x) Wᵀ + b). The GEMM multiplies the rows of other ranks as they arrive.
class OverlappedColumn final : public ForwardFusion {
 public:
  explicit OverlappedColumn(const Match& match)
      : linear_(match.find<ops::BasicLinear>()),
        bias_(match.find<ops::Bias>()),
        activation_(match.find<ops::ActivationOp>()),
        group_(match) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    return save_pre_act(ctx, activation_, forward_gemm(ctx, x, bias_activation(ctx, bias_, activation_)));
  }

 private:
  kernels::GemmResult forward_gemm(StepContext& ctx, const at::Tensor& x, kernels::Epilogue epilogue) const {
    auto linear = ctx.op(0);
    const auto& weight = ctx.params(0)[0];
    const auto [local, w] = linear_->operands(linear, x, weight);
    const auto rows = ops::as_matrix(local);
    OverlappedCall call(ctx, group_);
    auto* transport = call.all_gather(rows, w.size(0), w.size(1));
    if (!transport) return linear_->forward_gemm(linear, x, weight, std::move(epilogue));
    epilogue.b_is_weight = true;
    auto result = overlap::all_gather_gemm(*transport, rows, kernels::transposed(w), epilogue);
    result.out = with_leading_dims(result.out, x, group_.size);
    if (result.pre_act.defined()) result.pre_act = with_leading_dims(result.pre_act, x, group_.size);
    return result;
  }

  MatchedOp<ops::BasicLinear> linear_;
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ActivationOp> activation_;
  LinearGroup group_;
};

std::string reject(const Match& m, const PlanView& view) {
  const auto& linear = m.get<ops::BasicLinear>();
  if (!linear.gathers_input()) return "no communication in forward without sequence_parallel";
  return first_reason({reject_overlap(m, view),
                       reject_activation(m.find<ops::ActivationOp>(), linear.local_out_features()),
                       reject_mixed_dtypes(m, view, 0, m.size() - 1)});
}

}  // namespace

PatternRule forward_overlapped_column() {
  return {.name = "overlapped_column",
          .pattern = {column_linear(), maybe<ops::Bias>(), maybe<ops::ActivationOp>()},
          .reject = reject,
          .make = make_fused<OverlappedColumn>()};
}

}  // namespace weft::fused
