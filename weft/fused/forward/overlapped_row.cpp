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
        all_reduce_(match.find<ops::AllReduce>()) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    const overlap::OverlapPolicy::ScopedTimer timer(policy_);
    auto linear = ctx.op(0);
    const auto ranks = this->ranks();
    const auto [local, w] = linear_->operands(linear, x, ctx.params(0)[0]);
    const auto rows = ops::as_matrix(local);
    if (scatters() && x.size(0) % ranks != 0) return without_overlap(ctx, x);  // raises the error
    const overlap::OverlapShape shape{scatters() ? comm::CommOp::reduce_scatter : comm::CommOp::all_reduce,
                                      local.scalar_type(),
                                      (rows.size(0) + ranks - 1) / ranks,
                                      w.size(0),
                                      w.size(1),
                                      ranks};
    const auto transport = policy_.select(group(), shape, linear_->options().overlap);
    if (!transport) return without_overlap(ctx, x);
    const kernels::Epilogue epilogue{.bias = bias_of(ctx, bias_), .b_is_weight = true};
    if (!scatters())
      return ops::restore_leading_dims(overlap::gemm_all_reduce(*transport, rows, kernels::transposed(w), epilogue), x);
    return with_leading_dims(overlap::gemm_reduce_scatter(*transport, rows, kernels::transposed(w), epilogue), x,
                             -ranks);
  }

  std::string note() const override { return policy_.last_decision(); }

 private:
  bool scatters() const { return linear_->parallel() ? linear_->options().sequence_parallel : bool(reduce_scatter_); }
  const std::string& group() const {
    if (linear_->parallel()) return *linear_->options().tensor_parallel_group;
    return reduce_scatter_ ? *reduce_scatter_->options().process_group : *all_reduce_->options().process_group;
  }
  int ranks() const {
    if (linear_->parallel()) return static_cast<int>(linear_->options().tensor_parallel_size);
    return static_cast<int>(reduce_scatter_ ? reduce_scatter_->options().process_group_size
                                            : all_reduce_->options().process_group_size);
  }

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
  overlap::OverlapPolicy policy_;
};

PatternRule rule(std::string name, std::vector<Element> pattern) {
  return {.name = std::move(name),
          .pattern = std::move(pattern),
          .reject =
              [](const Match& m, const PlanView& view) {
                auto reason = reject_overlap(m, view);
                const int last = m.find<ops::Bias>() ? 1 : 0;
                return reason.empty() ? reject_mixed_dtypes(m, view, 0, last) : reason;
              },
          .make = make_fused<OverlappedRow>()};
}

}  // namespace

PatternRule forward_overlapped_row() {
  return rule("overlapped_row", {unsharded_linear(), maybe<ops::Bias>(), cross_rank_reduction()});
}
PatternRule forward_overlapped_row_inside() { return rule("overlapped_row_inside", {row_linear()}); }

}  // namespace weft::fused
