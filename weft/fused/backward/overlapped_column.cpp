#include "weft/fused/overlapped.h"
#include "weft/ops/rows.h"
#include "weft/overlap/schedules.h"

namespace weft::fused {
namespace {

/// dx = Σ_ranks dy W and dW = dyᵀ x, x of all ranks: x is gathered under the first product, dx summed under both.
class OverlappedColumnBackward final : public FusedOp {
 public:
  explicit OverlappedColumnBackward(const Match& match) : linear_(match.find<ops::BasicLinear>()) {}

  at::Tensor backward(StepContext& ctx, const at::Tensor& dy) const override {
    const overlap::Choice::Watch watch(choice_);
    auto linear = ctx.op(0);
    if (!linear.needs_input_grad()) return linear_->backward(linear, dy, ctx.params(0));  // no product to go under
    const auto& options = linear_->options();
    const auto& w = linear_->backward_weight(linear, ctx.params(0));
    const auto rows = ops::as_matrix(ops::as_dtype(dy, w.scalar_type()));
    const auto ranks = static_cast<int>(options.tensor_parallel_size);
    const bool scatters = options.sequence_parallel;
    const overlap::Shape shape{scatters ? comm::Operation::reduce_scatter : comm::Operation::all_reduce,
                               w.scalar_type(),
                               (rows.size(0) + ranks - 1) / ranks,
                               w.size(1),
                               w.size(0),
                               ranks};
    const auto link = choice_.link(*options.tensor_parallel_group, shape, options.overlap);
    if (!link) return linear_->backward(linear, dy, ctx.params(0));
    return scatters ? backward_reduce_scatter(ctx, *link, dy, rows, w) : backward_all_reduce(ctx, *link, dy, rows, w);
  }

  std::string note() const override { return choice_.last(); }

 private:
  at::Tensor backward_reduce_scatter(StepContext& ctx, comm::Link& link, const at::Tensor& dy, const at::Tensor& rows,
                       const at::Tensor& w) const {
    auto linear = ctx.op(0);
    const kernels::Epilogue epilogue{.b_is_weight = true};
    if (!linear.needs_param_grad(0))
      return with_leading_dims(overlap::gemm_reduce_scatter(link, rows, w, epilogue), dy, -link.size());
    const auto& x = linear.saved(ops::BasicLinear::kInput);
    overlap::GatherUnder gather(link, ops::as_matrix(x));
    overlap::ReduceUnder reduce(link, rows, w, epilogue, [&] { gather.advance(); });
    const std::function<void()> progress = [&] { reduce.advance(); };
    linear_->weight_gradient_of(linear, dy, with_leading_dims(gather.wait(), x, link.size()), 1,
                                link.in_place() ? nullptr : &progress);
    return with_leading_dims(reduce.wait(), dy, -link.size());
  }

  at::Tensor backward_all_reduce(StepContext& ctx, comm::Link& link, const at::Tensor& dy, const at::Tensor& rows,
                    const at::Tensor& w) const {
    auto linear = ctx.op(0);
    const auto dx = overlap::gemm_all_reduce(link, rows, w, {.b_is_weight = true});
    linear_->weight_gradient(linear, dy);
    return ops::restore_leading_dims(dx, dy);
  }

  MatchedOp<ops::BasicLinear> linear_;
  overlap::Choice choice_;
};

}  // namespace

FusionRule backward_overlapped_column() {
  return {.name = "overlapped_column_grad",
          .pass = Pass::backward,
          .pattern = {column_linear()},
          .reject = reject_overlap,
          .make = make_fused<OverlappedColumnBackward>,
          .sample = {},
          .rewrite = {}};
}

}  // namespace weft::fused
