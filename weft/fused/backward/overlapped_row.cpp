#include "weft/fused/overlapped.h"
#include "weft/ops/rows.h"
#include "weft/overlap/schedules.h"

namespace weft::fused {
namespace {

/// With h = act(p), p = u + c and y_r = Σ_ranks (h Wᵀ + b)_r, dy of all ranks used as it arrives:
///   dp = (all_gather(dy) W)·act'(p), dc = Σ_rows dp;  dW = all_gather(dy)ᵀ h;  db = Σ_rows all_gather(dy)
class OverlappedRow final : public FusedOp {
 public:
  explicit OverlappedRow(const Match& match)
      : activation_(match.find<ops::ActivationOp>()),
        linear_(match.find<ops::BasicLinear>()),
        bias_(match.find<ops::Bias>(linear_.at + 1)),
        scatter_(match.find<ops::ReduceScatter>()) {
    if (auto before = match.find<ops::Bias>(); before && before.at < linear_.at) before_ = std::move(before);
  }

  at::Tensor backward(StepContext& ctx, const at::Tensor& dy) const override {
    const overlap::Choice::Watch watch(choice_);
    auto linear = ctx.op(linear_.at);
    if (!linear.input_wanted()) return plain(ctx, dy);  // no product to go under
    const auto& w = linear_->backward_weight(linear, ctx.params(linear_.at));
    const auto mine = ops::as_matrix(ops::as_dtype(dy, w.scalar_type()));
    const overlap::Shape shape{
        comm::Operation::all_gather, w.scalar_type(), mine.size(0), w.size(1), w.size(0), ranks()};
    const auto link = choice_.link(group(), shape, linear_->options().overlap);
    if (!link) return plain(ctx, dy);
    at::Tensor all;
    const bool again = linear.param_wanted(0) || wants_bias(ctx);
    auto result = overlap::all_gather_gemm(*link, mine, w, epilogue(ctx), again ? &all : nullptr);
    if (again) all = with_leading(all, dy, ranks());
    give_gradients(ctx, all, std::move(result.sums));
    return ctx.op(0).input_wanted() ? with_leading(result.out, dy, ranks()) : at::Tensor{};
  }

  std::string note() const override { return choice_.last(); }

 private:
  int ranks() const {
    return static_cast<int>(scatter_ ? scatter_->options().process_group_size
                                     : linear_->options().tensor_parallel_size);
  }
  const std::string& group() const {
    return scatter_ ? *scatter_->options().process_group : *linear_->options().tensor_parallel_group;
  }
  bool wants_bias(StepContext& ctx) const { return bias_ && ctx.op(bias_.at).param_wanted(0); }
  bool wants_sums(StepContext& ctx) const { return before_ && ctx.op(before_.at).param_wanted(0); }

  kernels::Epilogue epilogue(StepContext& ctx) const {
    kernels::Epilogue e{.keep_sums = wants_sums(ctx), .weight = true};
    if (!activation_) return e;
    e.slope = activation_->act();
    e.at = ops::as_matrix(ctx.op(activation_.at).saved(ops::ActivationOp::kInput));
    return e;
  }

  /// Of the weight and the biases, from dy of all ranks and Σ_rows dp.
  void give_gradients(StepContext& ctx, const at::Tensor& dy, at::Tensor sums) const {
    auto linear = ctx.op(linear_.at);
    if (wants_bias(ctx)) bias_->set_gradient(ctx.op(bias_.at), ops::sum_rows(dy));
    linear_->weight_gradient(linear, dy);
    if (sums.defined()) before_->set_gradient(ctx.op(before_.at), std::move(sums));
  }

  at::Tensor plain(StepContext& ctx, const at::Tensor& dy) const {
    auto linear = ctx.op(linear_.at);
    at::Tensor all = dy;
    if (scatter_) {
      auto scatter = ctx.op(scatter_.at);
      all = scatter_->backward(scatter, dy, {});
    } else {
      all = linear_->gather_output_gradient(dy).wait();
    }
    auto result = linear_->input_gradient(linear, all, ctx.params(linear_.at), epilogue(ctx));
    give_gradients(ctx, all, std::move(result.sums));
    return ctx.op(0).input_wanted() ? result.out : at::Tensor{};
  }

  Part<ops::Bias> before_;
  Part<ops::ActivationOp> activation_;
  Part<ops::BasicLinear> linear_;
  Part<ops::Bias> bias_;
  Part<ops::ReduceScatter> scatter_;
  overlap::Choice choice_;
};

std::string refuse(const Match& m, const PlanView& view) {
  const auto linear = m.find<ops::BasicLinear>();
  const auto activation = m.find<ops::ActivationOp>();
  if (linear->parallel() && !linear->gathers_output_gradient())
    return "without sequence_parallel nothing passes between ranks in backward";
  if (auto reason = refuse_overlap(m, view); !reason.empty()) return reason;
  if (!activation) return linear.at > 0 ? "a bias before the linear, and no activation between" : "";
  if (auto reason = refuse_activation(*activation.op, 2 * linear->local_in()); !reason.empty()) return reason;
  return refuse_mixed_dtypes(m, view, activation.at, linear.at);
}

FusionRule rule(std::string name, std::vector<Element> pattern) {
  pattern.insert(pattern.begin(), {maybe<ops::Bias>(), maybe<ops::ActivationOp>()});
  return {.name = std::move(name),
          .pass = Pass::backward,
          .pattern = std::move(pattern),
          .refuse = refuse,
          .make = make_fused<OverlappedRow>,
          .sample = {},
          .rewrite = {}};
}

}  // namespace

FusionRule backward_overlapped_row() {
  return rule("overlapped_row_grad", {whole_linear(), maybe<ops::Bias>(), scatter_over_ranks()});
}
FusionRule backward_overlapped_row_inside() { return rule("overlapped_row_inside_grad", {row_linear()}); }

}  // namespace weft::fused
