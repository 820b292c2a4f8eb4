#include "weft/fused/overlapped.h"
#include "weft/ops/leading_dims.h"
#include "weft/overlap/schedules.h"

namespace weft::fused {
namespace {

/// dx = Σ_ranks dy W and dW = dyᵀ all_gather(x). Overlaps the all-gather of x with the dx GEMM, and the reduction of dx
/// with both GEMMs.
class OverlappedColumnBackward final : public BackwardFusion {
 public:
  explicit OverlappedColumnBackward(const Match& match) : linear_(match.find<ops::BasicLinear>()), group_(match) {}

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    const auto& dy = grad.value;
    OverlappedCall call(ctx, group_);
    auto linear = ctx.op(0);
    if (!linear.needs_input_grad()) return linear_->backward(linear, dy, ctx.params(0));  // no GEMM to overlap with
    const auto& w = linear_->backward_weight(linear, ctx.params(0));
    const auto rows = ops::as_matrix(ops::as_dtype(dy, w.scalar_type()));
    auto* transport = call.reduction(rows, w.size(1), w.size(0));
    if (!transport) return linear_->backward(linear, dy, ctx.params(0));
    return group_.scatters ? backward_reduce_scatter(ctx, *transport, dy, rows, w)
                           : backward_all_reduce(ctx, *transport, dy, rows, w);
  }

 private:
  at::Tensor backward_reduce_scatter(StepContext& ctx, comm::Transport& transport, const at::Tensor& dy,
                                     const at::Tensor& rows, const at::Tensor& w) const {
    auto linear = ctx.op(0);
    const kernels::Epilogue epilogue{.b_is_weight = true};
    if (!linear.needs_param_grad(0))
      return with_leading_dims(overlap::gemm_reduce_scatter(transport, rows, w, epilogue), dy, -transport.size());
    const auto& x = linear.saved(ops::BasicLinear::kInput);
    overlap::OverlappedAllGather gather(transport, ops::as_matrix(x));
    overlap::OverlappedReduceScatter reduce(transport, rows, w, epilogue, [&] { gather.progress(); });
    const std::function<void()> progress = [&] { reduce.progress(); };
    linear_->weight_gradient_of(linear, dy, with_leading_dims(gather.wait(), x, transport.size()), 1,
                                transport.zero_copy() ? nullptr : &progress);
    return with_leading_dims(reduce.wait(), dy, -transport.size());
  }

  at::Tensor backward_all_reduce(StepContext& ctx, comm::Transport& transport, const at::Tensor& dy,
                                 const at::Tensor& rows, const at::Tensor& w) const {
    auto linear = ctx.op(0);
    const auto dx = overlap::gemm_all_reduce(transport, rows, w, {.b_is_weight = true});
    linear_->weight_gradient(linear, dy);
    return ops::restore_leading_dims(dx, dy);
  }

  MatchedOp<ops::BasicLinear> linear_;
  LinearGroup group_;
};

}  // namespace

PatternRule backward_overlapped_column() {
  return {.name = "overlapped_column_grad",
          .pattern = {column_linear()},
          .reject = reject_overlap,
          .make = make_fused<OverlappedColumnBackward>()};
}

}  // namespace weft::fused
