#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "weft/fused/epilogues.h"
#include "weft/ops/cross_entropy.h"

namespace weft::fused {
namespace {

using ops::BasicLinear;
using ops::CrossEntropy;

constexpr int64_t kMinClasses = 4096;

/// Consecutive classes whose logits are computed together.
struct ClassBlock {
  int64_t first, count;

  at::Tensor rows(const at::Tensor& weight) const { return weight.narrow(0, first, count); }
};

/// Blocks whose logits take at most 4 MiB, but of at least 64 classes.
std::vector<ClassBlock> class_blocks(const at::Tensor& x, const at::Tensor& w) {
  constexpr int64_t kMaxBytes = 4 << 20, kUnit = 64;
  const auto bytes_per_class = std::max<int64_t>(x.size(0), 1) * static_cast<int64_t>(x.element_size());
  const auto count = std::max(kUnit, kMaxBytes / bytes_per_class / kUnit * kUnit);
  std::vector<ClassBlock> blocks;
  for (int64_t first = 0; first < w.size(0); first += count)
    blocks.push_back({first, std::min(count, w.size(0) - first)});
  return blocks;
}

/// The loss of the logits x Wᵀ, which are computed by blocks of classes and never stored together. Saves x and two
/// numbers per row. Backward computes each block of logits again and turns it into its gradient g; it writes the rows
/// gᵀ x of dW once and adds g W to dx in float32 (float64 for float64). With tensor parallelism each rank does this for
/// its shard of the classes, between the collectives of a column-parallel linear.
class LinearCrossEntropy final : public JointFusion {
 public:
  explicit LinearCrossEntropy(const Match& m) : linear_(m.find<BasicLinear>()), loss_(m.find<CrossEntropy>()) {}

  bool reads_saved(const ops::OpPlan*, int index, int slot) const override {
    return index == linear_.index || slot != CrossEntropy::kInput;
  }
  bool reads_param(int index, int) const override { return index == linear_.index; }

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto linear = ctx.op(linear_.index), loss = ctx.op(loss_.index);
    const auto [input, w] = linear_->operands(linear, x, ctx.params(linear_.index)[0]);
    const auto all = linear_->gather_input(input).wait();
    const auto matrix = ops::as_matrix(all);
    const auto targets = loss_->checked_targets(loss.extra_input(0), ops::Spec::of(all).with_last(w.size(0)).sizes);
    const auto rows = targets.reshape({-1});
    std::vector<at::Tensor> partials;
    for (const auto& block : class_blocks(matrix, w))
      partials.push_back(kernels::cross_entropy_partials(logits(matrix, w, block), rows, block_loss(w, block)));
    const auto spec = loss_->loss(w.size(0));
    auto [losses, statistics] =
        kernels::cross_entropy_forward(loss_->gather_partials(at::stack(partials), rows, spec), rows, spec);
    if (loss.needs_input_grad()) {
      loss.save(CrossEntropy::kTargets, targets);
      loss.save(CrossEntropy::kStatistics, std::move(statistics));
    }
    return loss_->reduce(losses, rows, targets);
  }

  ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const override {
    auto linear = ctx.op(linear_.index), loss = ctx.op(loss_.index);
    const auto input = linear_->gather_input(linear.saved(BasicLinear::kInput)).wait();
    const auto x = ops::as_matrix(input), targets = loss.saved(CrossEntropy::kTargets).reshape({-1});
    const auto w = ops::as_dtype(linear_->backward_weight(linear, ctx.params(linear_.index)), x.scalar_type());
    const auto opmath = at::toOpMathType(x.scalar_type());
    const auto row_gradients = loss_->row_gradients(grad.value, targets, opmath);
    const auto& statistics = loss.saved(CrossEntropy::kStatistics);
    at::Tensor dx;
    if (linear.needs_input_grad()) dx = at::zeros(x.sizes(), x.options().dtype(opmath));

    const auto differentiate = [&](const at::Tensor& dw, bool accumulate) {
      for (const auto& block : class_blocks(x, w)) {
        const auto g = kernels::cross_entropy_backward(row_gradients, logits(x, w, block), targets, statistics,
                                                       block_loss(w, block));
        if (dw.defined()) {
          const auto rows = block.rows(dw);
          kernels::gemm(kernels::transposed(g), x, {.addend = accumulate ? rows : at::Tensor(), .out = rows});
        }
        const auto classes = block.rows(w);
        if (dx.defined()) kernels::gemm(g, classes, {.addend = dx, .out = dx});
      }
    };
    TORCH_INTERNAL_ASSERT(!linear_->delays_wgrad());  // the rule rejects it: the closure refers to this call
    if (linear.needs_param_grad(0))
      linear_->weight_gradient_by(linear, [&](const at::Tensor& out, bool accumulate) {
        auto dw = out.defined() ? out.view(w.sizes()) : at::empty(w.sizes(), x.options());
        differentiate(dw, accumulate);
        return dw;
      });
    else
      differentiate({}, false);
    if (!dx.defined()) return dx;
    return linear_->reduce_input_gradient(ops::restore_leading_dims(ops::as_dtype(dx, x.scalar_type()), input)).wait();
  }

 private:
  static at::Tensor logits(const at::Tensor& x, const at::Tensor& w, const ClassBlock& block) {
    const auto rows = block.rows(w);
    return kernels::gemm(x, kernels::transposed(rows)).out;
  }
  kernels::CrossEntropyLoss block_loss(const at::Tensor& w, const ClassBlock& block) const {
    auto loss = loss_->loss(w.size(0));
    loss.first_class += block.first;
    return loss;
  }

  MatchedOp<BasicLinear> linear_;
  MatchedOp<CrossEntropy> loss_;
};

/// Rejects a linear whose output is reduced, or sharded otherwise than the loss expects.
std::string reject_shards(const BasicLinear& linear, const CrossEntropy& loss) {
  if (!linear.parallel()) return "";
  if (const auto reason = reject_reduced_output(linear); !reason.empty()) return reason;
  const bool same = loss.options().tensor_parallel_group == linear.options().tensor_parallel_group;
  return same ? "" : "the loss has another tensor_parallel_group than the linear, or none";
}

std::string reject(const Match& m, const PlanView& view) {
  const auto& linear = m.get<BasicLinear>();
  const auto& plan = view.plans[m.first()];
  const auto classes = linear.local_out_features();
  return first_reason({reject_shards(linear, m.get<CrossEntropy>()),
                       classes < kMinClasses ? "the linear has " + std::to_string(classes) + " classes, fewer than " +
                                                   std::to_string(kMinClasses) + ": storing the logits is faster"
                                             : "",
                       linear.delays_wgrad() ? "delay_wgrad_compute is on" : "",
                       plan.needs_input_grad && !plan.needs_param_grad[0] ? "the weight needs no gradient" : "",
                       reject_mixed_dtypes(m, view, 0, m.size() - 1)});
}

}  // namespace

PatternRule joint_linear_cross_entropy() {
  return {.name = "linear_cross_entropy",
          .pattern = {one<BasicLinear>(), one<CrossEntropy>()},
          .reject = reject,
          .make = make_fused<LinearCrossEntropy>(),
          .sample = []() -> std::vector<ops::OpPtr> {
            return {
                std::make_shared<BasicLinear>(BasicLinear::Options{.in_features = 8, .out_features = kMinClasses + 1}),
                std::make_shared<CrossEntropy>(CrossEntropy::Options{.label_smoothing = 0.1})};
          }};
}

}  // namespace weft::fused
