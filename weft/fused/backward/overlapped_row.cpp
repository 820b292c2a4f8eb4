#include "weft/fused/overlapped.h"
#include "weft/ops/leading_dims.h"
#include "weft/overlap/schedules.h"

namespace weft::fused {
namespace {

/// For y = reduce_scatter(h Wᵀ + b), h = act(p), p = u + c:
///   dp = (all_gather(dy) W)·act'(p), dc = Σ_rows dp;  dW = all_gather(dy)ᵀ h;  db = Σ_rows all_gather(dy)
/// The GEMM multiplies the rows of other ranks as they arrive.
class OverlappedRowBackward final : public BackwardFusion {
 public:
  explicit OverlappedRowBackward(const Match& match)
      : activation_(match.find<ops::ActivationOp>()),
        linear_(match.find<ops::BasicLinear>()),
        bias_(match.find<ops::Bias>(linear_.index + 1)),
        reduce_scatter_(match.find<ops::ReduceScatter>()),
        group_(match) {
    if (auto bias = match.find<ops::Bias>(); bias && bias.index < linear_.index) input_bias_ = std::move(bias);
  }

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    const auto& dy = grad.value;
    OverlappedCall call(ctx, group_);
    auto linear = ctx.op(linear_.index);
    if (!linear.needs_input_grad()) return without_overlap(ctx, dy);  // no GEMM to overlap with
    const auto& w = linear_->backward_weight(linear, ctx.params(linear_.index));
    const auto local = ops::as_matrix(ops::as_dtype(dy, w.scalar_type()));
    auto* transport = call.all_gather(local.scalar_type(), local.size(0), w.size(1), w.size(0));
    if (!transport) return without_overlap(ctx, dy);
    at::Tensor all;
    const bool needs_all_dy = linear.needs_param_grad(0) || needs_bias_grad(ctx);
    auto result = overlap::all_gather_gemm(*transport, local, w, epilogue(ctx), needs_all_dy ? &all : nullptr);
    if (needs_all_dy) all = with_leading_dims(all, dy, group_.size);
    set_gradients(ctx, all, std::move(result.column_sums));
    return ctx.op(0).needs_input_grad() ? with_leading_dims(result.out, dy, group_.size) : at::Tensor{};
  }

 private:
  bool needs_bias_grad(StepContext& ctx) const { return bias_ && ctx.op(bias_.index).needs_param_grad(0); }
  bool needs_input_bias_grad(StepContext& ctx) const {
    return input_bias_ && ctx.op(input_bias_.index).needs_param_grad(0);
  }

  kernels::Epilogue epilogue(StepContext& ctx) const {
    kernels::Epilogue e{.keep_column_sums = needs_input_bias_grad(ctx), .b_is_weight = true};
    if (!activation_) return e;
    e.act_grad = activation_->act();
    e.act_input = ops::as_matrix(ctx.op(activation_.index).saved(ops::ActivationOp::kInput));
    return e;
  }

  /// Sets the gradients of the weight and the biases from the gathered dy and Σ_rows dp.
  void set_gradients(StepContext& ctx, const at::Tensor& dy, at::Tensor input_bias_grad) const {
    auto linear = ctx.op(linear_.index);
    if (needs_bias_grad(ctx)) bias_->set_gradient(ctx.op(bias_.index), ops::sum_rows(dy));
    linear_->weight_gradient(linear, dy);
    if (input_bias_grad.defined()) input_bias_->set_gradient(ctx.op(input_bias_.index), std::move(input_bias_grad));
  }

  at::Tensor without_overlap(StepContext& ctx, const at::Tensor& dy) const {
    auto linear = ctx.op(linear_.index);
    at::Tensor all = dy;
    if (reduce_scatter_) {
      auto scatter = ctx.op(reduce_scatter_.index);
      all = reduce_scatter_->backward(scatter, dy, {});
    } else {
      all = linear_->gather_output_gradient(dy).wait();
    }
    auto result = linear_->input_gradient(linear, all, ctx.params(linear_.index), epilogue(ctx));
    set_gradients(ctx, all, std::move(result.column_sums));
    return ctx.op(0).needs_input_grad() ? result.out : at::Tensor{};
  }

  MatchedOp<ops::Bias> input_bias_;
  MatchedOp<ops::ActivationOp> activation_;
  MatchedOp<ops::BasicLinear> linear_;
  MatchedOp<ops::Bias> bias_;
  MatchedOp<ops::ReduceScatter> reduce_scatter_;
  LinearGroup group_;
};

std::string reject(const Match& m, const PlanView& view) {
  const auto linear = m.find<ops::BasicLinear>();
  const auto activation = m.find<ops::ActivationOp>();
  if (linear->parallel() && !linear->gathers_output_gradient())
    return "no communication in backward without sequence_parallel";
  if (auto reason = reject_overlap(m, view); !reason.empty()) return reason;
  if (!activation) return linear.index > 0 ? "a bias precedes the linear without an activation in between" : "";
  return first_reason({reject_activation(activation, 2 * linear->local_in_features()),
                       reject_mixed_dtypes(m, view, activation.index, linear.index)});
}

PatternRule rule(std::string name, std::vector<Element> pattern) {
  pattern.insert(pattern.begin(), {maybe<ops::Bias>(), maybe<ops::ActivationOp>()});
  return {.name = std::move(name),
          .pattern = std::move(pattern),
          .reject = reject,
          .make = make_fused<OverlappedRowBackward>()};
}

}  // namespace

PatternRule backward_overlapped_row() {
  return rule("overlapped_row_grad", {unsharded_linear(), maybe<ops::Bias>(), cross_rank_reduce_scatter()});
}
PatternRule backward_overlapped_row_inside() { return rule("overlapped_row_inside_grad", {row_linear()}); }

}  // namespace weft::fused
