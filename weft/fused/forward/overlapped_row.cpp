#include "weft/fused/overlapped.h"
#include "weft/ops/leading_dims.h"
#include "weft/overlap/schedules.h"

namespace weft::fused {
namespace {

/// y = reduce_scatter(x Wᵀ + b) or all_reduce(x Wᵀ + b). The rows of other ranks are sent as soon as they are computed.
class OverlappedRow final : public ForwardFusion {
 public:
  explicit OverlappedRow(const Match& match)
      : linear_(match.find<ops::BasicLinear>()),
        bias_(match.find<ops::Bias>()),
        reduce_scatter_(match.find<ops::ReduceScatter>()),
        all_reduce_(match.find<ops::AllReduce>()),
        group_(match) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    OverlappedCall call(ctx, group_);
    auto linear = ctx.op(0);
    const auto [local, w] = linear_->operands(linear, x, ctx.params(0)[0]);
    const auto rows = ops::as_matrix(local);
    if (group_.scatters && x.size(0) % group_.size != 0) return without_overlap(ctx, x);  // raises the error
    auto* transport = call.reduction(rows, w.size(0), w.size(1));
    if (!transport) return without_overlap(ctx, x);
    const kernels::Epilogue epilogue{.bias = bias_of(ctx, bias_), .b_is_weight = true};
    if (!group_.scatters)
      return ops::restore_leading_dims(overlap::gemm_all_reduce(*transport, rows, kernels::transposed(w), epilogue), x);
    return with_leading_dims(overlap::gemm_reduce_scatter(*transport, rows, kernels::transposed(w), epilogue), x,
                             -group_.size);
  }

 private:
  at::Tensor without_overlap(StepContext& ctx, const at::Tensor& x) const {
    auto linear = ctx.op(0);
    if (linear_->parallel()) return linear_->forward(linear, x, ctx.params(0));
    const auto y = linear_->forward_gemm(linear, x, ctx.params(0)[0], {.bias = bias_of(ctx, bias_)}).out;
    const int last = reduce_scatter_ ? reduce_scatter_.index : all_reduce_.index;
    auto reduction = ctx.op(last);
    return reduce_scatter_ ? reduce_scatter_->forward(reduction, y, {}) : all_reduce_->forward(reduction, y, {});
  }

  MatchedOp<ops::BasicLinear> linear_;
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ReduceScatter> reduce_scatter_;
  MatchedOp<ops::AllReduce> all_reduce_;
  LinearGroup group_;
};

PatternRule rule(std::string name, std::vector<Element> pattern) {
  return {.name = std::move(name),
          .pattern = std::move(pattern),
          .reject =
              [](const Match& m, const PlanView& view) {
                const int last = m.find<ops::Bias>() ? 1 : 0;
                return first_reason({reject_overlap(m, view), reject_mixed_dtypes(m, view, 0, last)});
              },
          .make = make_fused<OverlappedRow>()};
}

}  // namespace

PatternRule forward_overlapped_row() {
  return rule("overlapped_row", {unsharded_linear(), maybe<ops::Bias>(), cross_rank_reduction()});
}
PatternRule forward_overlapped_row_inside() { return rule("overlapped_row_inside", {row_linear()}); }

}  // namespace weft::fused
