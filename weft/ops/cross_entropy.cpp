#include "weft/ops/cross_entropy.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/sum.h>

#include "weft/core/host_memory.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/parallel.h"
#include "weft/ops/registry.h"

namespace weft::ops {
namespace {

/// Raises unless the logits have classes and the targets are one class index per row.
void check_targets(c10::SymIntArrayRef x, c10::SymIntArrayRef targets, at::ScalarType target_dtype) {
  TORCH_CHECK_VALUE(!x.empty(), "input is a scalar, expected logits with the classes in the last dimension.");
  TORCH_CHECK_VALUE(x.back().sym_gt(0).expect_true(__FILE__, __LINE__), "input has shape ", x,
                    ", expected at least 1 class in the last dimension.");
  const auto rows = x.slice(0, x.size() - 1);
  if (target_dtype != at::kLong && target_dtype != at::kInt) {
    TORCH_CHECK_TYPE(targets.size() != x.size(), "targets are ", dtype_name(target_dtype), " of shape ", targets,
                     ", expected int64 class indices of shape ", rows,
                     ". Convert one-hot targets with targets.argmax(-1); class probabilities are not supported.");
    TORCH_CHECK_TYPE(false, "targets are ", dtype_name(target_dtype),
                     ", expected class indices in int64 or int32. Convert them with targets.long().");
  }
  TORCH_CHECK_VALUE(same_sizes(rows, targets), "targets have shape ", targets, ", the input has shape ", x,
                    "; expected targets of shape ", rows, ", one class index per row",
                    targets.size() == x.size() ? ". Convert one-hot targets with targets.argmax(-1)." : ".");
}

/// A column for the partials of a rank, by which ranks compare their targets. Exact in float32.
at::Tensor target_column(const at::Tensor& targets, at::ScalarType dtype) {
  return targets.remainder(1 << 24).to(dtype).unsqueeze(1);
}

/// Raises unless all ranks have the same number of classes, and the same targets: each rank adds the logit of its own
/// classes only. `by_rank` holds the partials of each rank and its target column.
void check_shards(const at::Tensor& by_rank) {
  if (!in_host_memory(by_rank.device()) || by_rank.size(1) == 0) return;
  const auto columns = by_rank.select(2, kernels::kPartialColumns).select(1, 0);
  TORCH_CHECK_VALUE(columns.eq(columns[0]).all().item<bool>(), "the ranks have logits of ",
                    columns.min().item<int64_t>(), " to ", columns.max().item<int64_t>(),
                    " classes, expected equal shards. Pad the weight of the head.");
  const auto targets = by_rank.select(2, kernels::kNumPartials);
  const auto differs = targets.ne(targets[0]).any(0);
  TORCH_CHECK_VALUE(!differs.any().item<bool>(), "the ranks have different targets in ", differs.sum().item<int64_t>(),
                    " of ", differs.size(0), " rows, first in row ", differs.nonzero()[0].item<int64_t>(),
                    "; expected the same targets on every rank of the group. ", "Broadcast them from one rank.");
}

/// The number of rows that are not ignored.
at::Tensor count_rows(const at::Tensor& targets, int64_t ignore_index) { return targets.ne(ignore_index).sum(); }

}  // namespace

CrossEntropy::CrossEntropy(Options options) : options_(std::move(options)) {
  TORCH_CHECK_VALUE(options_.label_smoothing >= 0 && options_.label_smoothing <= 1, "CrossEntropy: label_smoothing is ",
                    options_.label_smoothing, ", expected 0 to 1.");
  TORCH_CHECK_VALUE(options_.z_loss >= 0 && std::isfinite(options_.z_loss), "CrossEntropy: z_loss is ", options_.z_loss,
                    ", expected a finite number, 0 or more.");
  auto& ranks = options_.tensor_parallel_size;
  ranks = options_.tensor_parallel ? resolve_group_size("CrossEntropy", options_.tensor_parallel_group, ranks) : 1;
  if (ranks > 1) return;
  options_.tensor_parallel = false;
  options_.tensor_parallel_group.reset();
}

kernels::CrossEntropyLoss CrossEntropy::loss(int64_t columns) const {
  return {.classes = columns * options_.tensor_parallel_size,
          .first_class = options_.tensor_parallel ? columns * group().rank() : 0,
          .ignore_index = options_.ignore_index,
          .label_smoothing = options_.label_smoothing,
          .z_loss = options_.z_loss};
}

Inferred CrossEntropy::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra, c10::ArrayRef<Spec>) const {
  const auto& targets = extra[0];
  check_targets(x.sizes, targets.sizes, targets.dtype);
  const auto dtype = at::toOpMathType(x.dtype);
  Inferred out{.y = per_row() ? targets.as(dtype) : Spec{{}, dtype}};
  out.saved.resize(3);
  if (plan.needs_input_grad) {
    out.saved[kInput] = saved_input(x, x.dtype);
    out.saved[kTargets] = targets.as(at::kLong);
    out.saved[kStatistics] = Spec{{x.rows(), 2}, dtype};
  }
  return out;
}

at::Tensor CrossEntropy::checked_targets(const at::Tensor& targets, c10::SymIntArrayRef logits) const {
  check_targets(logits, targets.sym_sizes(), targets.scalar_type());
  auto classes = as_dtype(targets, at::kLong);
  kernels::check_targets(classes, loss(logits.back().expect_int()));
  return classes;
}

at::Tensor CrossEntropy::gather_partials(const at::Tensor& partials, const at::Tensor& targets,
                                         const kernels::CrossEntropyLoss& loss) const {
  if (!options_.tensor_parallel) return partials;
  const auto own = partials.size(0) == 1 ? partials[0] : kernels::combine_cross_entropy_partials(partials, loss);
  const auto all = group().all_gather(at::cat({own, target_column(targets, own.scalar_type())}, 1)).wait();
  const auto by_rank = all.view({options_.tensor_parallel_size, own.size(0), kernels::kNumPartials + 1});
  check_shards(by_rank);
  return by_rank.narrow(2, 0, kernels::kNumPartials);
}

at::Tensor CrossEntropy::reduce(const at::Tensor& losses, const at::Tensor& rows, const at::Tensor& like) const {
  if (per_row()) return losses.view(like.sizes());
  auto sum = at::sum(losses, at::kDouble);
  if (options_.reduction == Reduction::mean) sum = sum.div(count_rows(rows, options_.ignore_index));
  return as_dtype(sum, losses.scalar_type());
}

at::Tensor CrossEntropy::row_gradients(const at::Tensor& dy, const at::Tensor& rows, at::ScalarType dtype) const {
  auto grad = as_dtype(dy, dtype);
  if (options_.reduction == Reduction::mean) grad = grad.div(count_rows(rows, options_.ignore_index));
  return per_row() ? grad.reshape({-1}) : grad.expand({rows.size(0)});
}

at::Tensor CrossEntropy::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  const auto targets = checked_targets(ctx.extra_input(0), x.sym_sizes());
  const auto rows = targets.reshape({-1}), logits = as_matrix(x);
  const auto spec = loss(logits.size(1));
  const auto partials = kernels::cross_entropy_partials(logits, rows, spec).unsqueeze(0);
  auto [losses, statistics] = kernels::cross_entropy_forward(gather_partials(partials, rows, spec), rows, spec);
  if (ctx.needs_input_grad()) {
    ctx.save(kInput, x);
    ctx.save(kTargets, targets);
    ctx.save(kStatistics, std::move(statistics));
  }
  return reduce(losses, rows, targets);
}

at::Tensor CrossEntropy::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (!ctx.needs_input_grad()) return {};
  const auto& x = ctx.saved(kInput);
  const auto logits = as_matrix(x), rows = ctx.saved(kTargets).reshape({-1});
  const auto grad = row_gradients(dy, rows, at::toOpMathType(x.scalar_type()));
  return kernels::cross_entropy_backward(grad, logits, rows, ctx.saved(kStatistics), loss(logits.size(1)))
      .view(x.sizes());
}

static const Register<CrossEntropy> cross_entropy{
    "CrossEntropy",
    {.summary = "Computes the cross entropy of logits and class indices: y = mean(logsumexp(x) - x[target]).",
     .details = "The targets, class indices in int64 or int32, are an extra input without gradient. The loss is that "
                "of ``torch.nn.functional.cross_entropy`` on ``x.float()``, plus ``z_loss * logsumexp(x)**2`` per row. "
                "It is computed in float32 (float64 for float64) whatever the dtype of the logits, and does not "
                "overflow for any finite logit. Backward saves the logits and two numbers per row. With "
                "tensor_parallel each rank passes its shard of the logits and the same targets, and every rank "
                "returns the same loss.",
     .shape = "Input: ``(*, V)``, logits of V classes; with tensor_parallel over p ranks ``(*, V / p)``.\nExtra input: "
              "``(*)``, the class index of each row.\nOutput: a scalar; ``(*)`` with reduction ``\"none\"``.",
     .example_inputs = "torch.randn(2, 8), torch.tensor([3, 5])",
     .example_shape = "[]"},
    {.label_smoothing = 0.1, .reduction = Reduction::none, .z_loss = 0.01}};

}  // namespace weft::ops
