#include "weft/fused/overlapped.h"
#include "weft/ops/rows.h"
#include "weft/overlap/schedules.h"

namespace weft::fused {
namespace {

/// y = act(all_gather(x) Wᵀ + b), rows of other ranks multiplied as they arrive.
class OverlappedColumn final : public FusedOp {
 public:
  explicit OverlappedColumn(const Match& match)
      : linear_(match.find<ops::BasicLinear>()),
        bias_(match.find<ops::Bias>()),
        activation_(match.find<ops::ActivationOp>()) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    const overlap::Choice::Watch watch(choice_);
    const bool keep = activation_ && ctx.op(activation_.at).input_wanted();
    kernels::Epilogue epilogue{.bias = bias_of(ctx, bias_), .keep_pre = keep};
    if (activation_) epilogue.act = activation_->act();
    auto result = multiply(ctx, x, std::move(epilogue));
    if (keep) ctx.op(activation_.at).save(ops::ActivationOp::kInput, std::move(result.pre));
    return result.out;
  }

  std::string note() const override { return choice_.last(); }

 private:
  kernels::GemmResult multiply(StepContext& ctx, const at::Tensor& x, kernels::Epilogue epilogue) const {
    auto linear = ctx.op(0);
    const auto& weight = ctx.params(0)[0];
    const auto [mine, w] = linear_->operands(linear, x, weight);
    const auto rows = ops::as_matrix(mine);
    const auto& options = linear_->options();
    const auto ranks = static_cast<int>(options.tensor_parallel_size);
    const overlap::Shape shape{
        comm::Operation::all_gather, mine.scalar_type(), rows.size(0), w.size(0), w.size(1), ranks};
    const auto link = choice_.link(*options.tensor_parallel_group, shape, options.overlap);
    if (!link) return linear_->product(linear, x, weight, std::move(epilogue));
    epilogue.weight = true;
    auto result = overlap::all_gather_gemm(*link, rows, kernels::transposed(w), epilogue);
    result.out = with_leading(result.out, x, ranks);
    if (result.pre.defined()) result.pre = with_leading(result.pre, x, ranks);
    return result;
  }

  Part<ops::BasicLinear> linear_;
  Part<ops::Bias> bias_;
  Part<ops::ActivationOp> activation_;
  overlap::Choice choice_;
};

std::string refuse(const Match& m, const PlanView& view) {
  const auto& linear = m.get<ops::BasicLinear>();
  if (!linear.gathers_input()) return "without sequence_parallel nothing passes between ranks in forward";
  if (auto reason = refuse_overlap(m, view); !reason.empty()) return reason;
  if (const auto activation = m.find<ops::ActivationOp>())
    if (auto reason = refuse_activation(*activation.op, linear.local_out()); !reason.empty()) return reason;
  return refuse_mixed_dtypes(m, view, 0, m.size() - 1);
}

}  // namespace

FusionRule forward_overlapped_column() {
  return {.name = "overlapped_column",
          .pass = Pass::forward,
          .pattern = {column_linear(), maybe<ops::Bias>(), maybe<ops::ActivationOp>()},
          .refuse = refuse,
          .make = make_fused<OverlappedColumn>,
          .sample = {},
          .rewrite = {}};
}

}  // namespace weft::fused
