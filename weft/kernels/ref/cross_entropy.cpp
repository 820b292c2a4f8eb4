#include "weft/kernels/cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>

#include <limits>

#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::ref {
namespace {

/// The column of each target, and whether this rank has it and the row is not ignored.
struct LocalTargets {
  at::Tensor column, owned;  // [rows, 1]; column is 0 where not owned

  LocalTargets(const at::Tensor& targets, int64_t columns, const CrossEntropyLoss& loss) {
    const auto local = targets.sub(loss.first_class);
    owned = local.ge(0).bitwise_and_(local.lt(columns)).bitwise_and_(targets.ne(loss.ignore_index)).unsqueeze(1);
    column = local.unsqueeze(1).masked_fill(owned.bitwise_not(), 0);
  }
};

}  // namespace

at::Tensor cross_entropy_partials(const at::Tensor& logits, const at::Tensor& targets, const CrossEntropyLoss& loss) {
  const auto ignored = targets.eq(loss.ignore_index).unsqueeze(1);
  const auto x = to_opmath(logits).masked_fill(ignored, 0);
  const auto max = x.amax(-1, /*keepdim=*/true);
  const auto finite_max = max.masked_fill(max.eq(-std::numeric_limits<double>::infinity()), 0);
  const auto half_mean = (x / 2 - finite_max / 2).div_(static_cast<double>(loss.classes)).sum(1);
  const LocalTargets local(targets, x.size(1), loss);
  const auto target_logit = x.gather(1, local.column).masked_fill_(local.owned.bitwise_not(), 0);
  return at::stack({max.squeeze(1), (x - finite_max).exp_().sum(1), target_logit.squeeze(1), half_mean,
                    at::full_like(half_mean, x.size(1))},
                   1);
}

at::Tensor cross_entropy_backward(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& targets,
                                  const at::Tensor& statistics, const CrossEntropyLoss& loss) {
  const auto x = to_opmath(logits);
  const auto g = as_dtype(grad, x.scalar_type()).unsqueeze(1);
  const auto max = statistics.select(1, 0).unsqueeze(1), sum = statistics.select(1, 1).unsqueeze(1);
  auto dx = (x - max).exp_().div_(sum);
  if (loss.z_loss != 0) dx.mul_((max + sum.log()).mul_(2 * loss.z_loss).add_(1));
  dx.sub_(loss.label_smoothing / static_cast<double>(loss.classes));
  const LocalTargets local(targets, x.size(1), loss);
  dx.scatter_add_(1, local.column, as_dtype(local.owned, x.scalar_type()).mul_(loss.label_smoothing - 1));
  dx.mul_(g).masked_fill_(targets.eq(loss.ignore_index).unsqueeze(1), 0);
  return as_dtype(dx, logits.scalar_type());
}

}  // namespace weft::kernels::ref
