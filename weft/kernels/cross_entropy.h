#pragma once
#include <ATen/core/Tensor.h>

namespace weft::kernels {

// Cross entropy of rows of logits. The logits [rows, n] are of n consecutive classes, all or those of one rank or
// block; ranks hold the same targets, int64 [rows]. With M the maximum of a row over all classes, S = Σ_j exp(x_j - M)
// and lse = M + log S:
//   loss = lse - (1 - eps)·x_target - eps·mean_j(x_j) + z·lse²,  computed from differences to M, so that no finite
//   logit overflows. A row whose target is ignore_index has loss 0 and gradient 0, and its logits are not read.

struct CrossEntropyLoss {
  int64_t classes = 0;      // over all ranks
  int64_t first_class = 0;  // of the logits given
  int64_t ignore_index = -100;
  double label_smoothing = 0;  // eps
  double z_loss = 0;           // z
};

/// Raises IndexError unless each target is a class or `ignore_index`. Reads CPU tensors only.
void check_targets(const at::Tensor& targets, const CrossEntropyLoss& loss);

/// Columns of `cross_entropy_partials`, over the classes of one rank; m is their maximum.
enum CrossEntropyPartial {
  kPartialMax,
  kPartialSumExp,
  kPartialTarget,
  kPartialHalfMean,
  kPartialColumns,
  kNumPartials
};
/// [rows, kNumPartials] in the opmath dtype: m, Σ exp(x - m), the target's logit (0 if another rank has it), half of
/// Σ (x - m)/classes, which may be 0 if eps is 0, and the number of logits.
at::Tensor cross_entropy_partials(const at::Tensor& logits, const at::Tensor& targets, const CrossEntropyLoss& loss);

/// The partials of the union of disjoint parts of the classes, [rows, kNumPartials], from those of the parts, [parts,
/// rows, kNumPartials]. Computes in float64 and rounds once.
at::Tensor combine_cross_entropy_partials(const at::Tensor& partials, const CrossEntropyLoss& loss);

struct CrossEntropyForward {
  at::Tensor loss;        // [rows], in the dtype of the partials
  at::Tensor statistics;  // [rows, 2]: M and S, which backward reads
};
/// Combines the partials of disjoint parts of the classes (of ranks, or of blocks of columns), [parts, rows,
/// kNumPartials]. Computes in float64 and rounds once.
CrossEntropyForward cross_entropy_forward(const at::Tensor& partials, const at::Tensor& targets,
                                          const CrossEntropyLoss& loss);

/// dx_j = g·(softmax_j·(1 + 2z·lse) - (1 - eps)·[j = target] - eps/classes), rounded once to the dtype of the logits.
/// `grad` is g, [rows].
at::Tensor cross_entropy_backward(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& targets,
                                  const at::Tensor& statistics, const CrossEntropyLoss& loss);

}  // namespace weft::kernels
