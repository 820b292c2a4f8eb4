#include "weft/kernels/cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

bool is_readable_index(const at::Tensor& targets) {
  return in_host_memory(targets.device()) && targets.scalar_type() == at::kLong && is_plain_strided(targets);
}

/// What both passes tell the loops. `dense_logits` and `dense_targets` are contiguous.
CrossEntropyCall make_call(const at::Tensor& dense_logits, const at::Tensor& dense_targets,
                           const CrossEntropyLoss& loss) {
  return {.columns = dense_logits.sizes()[1],
          .first_class = loss.first_class,
          .ignore_index = loss.ignore_index,
          .inv_classes = 1 / static_cast<double>(loss.classes),
          .label_smoothing = loss.label_smoothing,
          .z_loss = loss.z_loss,
          .dtype = dense_logits.scalar_type(),
          .logits = dense_logits.const_data_ptr(),
          .targets = dense_targets.const_data_ptr<int64_t>()};
}

constexpr auto kMinusInfinity = -std::numeric_limits<double>::infinity();

/// The columns of the partials of the union of disjoint parts, in float64, each [rows].
std::vector<at::Tensor> combine(const at::Tensor& partials, const CrossEntropyLoss& loss) {
  const auto all = as_dtype(partials, at::kDouble).unbind(-1);  // each [parts, rows]
  auto max = all[kPartialMax].amax(0);
  // A part whose logits are all -inf adds nothing to the sum.
  const auto below_max = all[kPartialMax].sub(max).masked_fill_(all[kPartialMax].eq(kMinusInfinity), kMinusInfinity);
  std::vector<at::Tensor> out(kNumPartials);
  out[kPartialSumExp] = all[kPartialSumExp].mul(below_max.exp()).sum(0);
  out[kPartialTarget] = all[kPartialTarget].sum(0);
  const auto half_share = all[kPartialColumns] / (2 * static_cast<double>(loss.classes));
  out[kPartialHalfMean] =
      loss.label_smoothing != 0 ? (all[kPartialHalfMean] + below_max * half_share).sum(0) : at::zeros_like(max);
  out[kPartialColumns] = all[kPartialColumns].sum(0);
  out[kPartialMax] = std::move(max);
  return out;
}

}  // namespace

void check_targets(const at::Tensor& targets, const CrossEntropyLoss& loss) {
  if (!is_readable_index(targets)) return;
  const auto dense = contiguous(targets);
  const auto* t = dense.const_data_ptr<int64_t>();
  const auto* end = t + dense.numel();
  const auto* bad = std::find_if_not(
      t, end, [&](int64_t target) { return (target >= 0 && target < loss.classes) || target == loss.ignore_index; });
  TORCH_CHECK_INDEX(bad == end, "target ", *bad, " of row ", bad - t, " is out of range; expected 0 to ",
                    loss.classes - 1, ", or ", loss.ignore_index, " (ignore_index).");
}

at::Tensor cross_entropy_partials(const at::Tensor& logits, const at::Tensor& targets, const CrossEntropyLoss& loss) {
  const auto tier = is_readable_index(targets) ? vector_tier(logits) : Tier::ref;
  if (tier == Tier::ref) return ref::cross_entropy_partials(logits, targets, loss);
  const auto rows = logits.sizes()[0];
  const auto dense_logits = contiguous(logits, logits.numel(), "the logits");
  const auto dense_targets = contiguous(targets, rows, "the targets");
  auto partials = new_empty(logits, {rows, kNumPartials}, at::kFloat);
  auto call = make_call(dense_logits, dense_targets, loss);
  call.partials = partials.mutable_data_ptr<float>();
  parallel_rows(rows, call.columns,
                [&](int64_t begin, int64_t end) { cross_entropy_loops(tier).forward(call, begin, end); });
  return partials;
}

at::Tensor combine_cross_entropy_partials(const at::Tensor& partials, const CrossEntropyLoss& loss) {
  return as_dtype(at::stack(combine(partials, loss), 1), partials.scalar_type());
}

CrossEntropyForward cross_entropy_forward(const at::Tensor& partials, const at::Tensor& targets,
                                          const CrossEntropyLoss& loss) {
  const auto dtype = partials.scalar_type();
  const auto all = combine(partials, loss);  // each [rows]
  const auto& max = all[kPartialMax];
  // If all logits of a row are -inf, the result is NaN as in torch.
  const auto sum = all[kPartialSumExp].masked_fill(max.eq(kMinusInfinity), std::nan(""));
  const auto log_sum = sum.log();
  auto rows = log_sum - (all[kPartialTarget] - max) * (1 - loss.label_smoothing);
  if (loss.label_smoothing != 0) rows.sub_(all[kPartialHalfMean], 2 * loss.label_smoothing);
  if (loss.z_loss != 0) rows.add_((max + log_sum).square_(), loss.z_loss);
  rows.masked_fill_(targets.eq(loss.ignore_index), 0);
  return {as_dtype(rows, dtype), as_dtype(at::stack({max, sum}, 1), dtype)};
}

at::Tensor cross_entropy_backward(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& targets,
                                  const at::Tensor& statistics, const CrossEntropyLoss& loss) {
  const bool fits =
      is_readable_index(targets) && grad.scalar_type() == at::kFloat && statistics.scalar_type() == at::kFloat;
  const auto tier = fits ? vector_tier(logits, grad, statistics) : Tier::ref;
  if (tier == Tier::ref) return ref::cross_entropy_backward(grad, logits, targets, statistics, loss);
  const auto rows = logits.sizes()[0];
  const auto dense_logits = contiguous(logits, logits.numel(), "the logits");
  const auto dense_targets = contiguous(targets, rows, "the targets");
  const auto dense_grad = contiguous(grad, rows, "the gradient");
  const auto dense_statistics = contiguous(statistics, 2 * rows, "the saved statistics");
  auto dx = new_empty(logits, logits.sizes(), logits.scalar_type());
  auto call = make_call(dense_logits, dense_targets, loss);
  call.statistics = dense_statistics.const_data_ptr<float>();
  call.grad = dense_grad.const_data_ptr<float>();
  call.out = dx.mutable_data_ptr();
  parallel_rows(rows, call.columns,
                [&](int64_t begin, int64_t end) { cross_entropy_loops(tier).backward(call, begin, end); });
  return dx;
}

}  // namespace weft::kernels
