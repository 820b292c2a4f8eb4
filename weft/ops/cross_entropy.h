#pragma once
#include <array>
#include <cmath>

#include "weft/comm/group.h"
#include "weft/kernels/cross_entropy.h"
#include "weft/ops/field_descriptions.h"
#include "weft/ops/operation.h"

namespace weft::ops {

enum class Reduction { mean, sum, none };

/// For each row x of logits with target t:
///   lse = log Σ_j exp(x_j);  l = lse - (1 - label_smoothing)·x_t - label_smoothing·mean_j(x_j) + z_loss·lse²
/// and l = 0 for rows whose target is ignore_index. y is the mean of l over the other rows, its sum, or l itself, in
/// float32 (float64 for float64).
/// dx_j = g·(softmax(x)_j·(1 + 2·z_loss·lse) - (1 - label_smoothing)·[j = t] - label_smoothing/V), where g is dy, or dy
/// divided by the number of rows of the mean. Saves no probabilities: backward computes them from the logits, their
/// maximum and Σ_j exp(x_j - maximum).
/// tensor_parallel: x holds this rank's shard of the V classes, the targets and the loss are replicated. Forward
/// all-gathers five numbers per row and rank; backward does not communicate. dx is that of one loss: all ranks must
/// pass the same dy.
class CrossEntropy final : public Op<CrossEntropy> {
 public:
  struct Options {
    int64_t ignore_index = -100;
    double label_smoothing = 0;
    Reduction reduction = Reduction::mean;
    double z_loss = 0;
    bool tensor_parallel = false;
    std::optional<std::string> tensor_parallel_group = {};
    int64_t tensor_parallel_size = 1;
    static constexpr auto fields() {
      return std::tuple{
          Field{"ignore_index", &Options::ignore_index, "Rows with this target have loss 0 and gradient 0."},
          Field{"label_smoothing", &Options::label_smoothing,
                "Share of the target's probability that is spread evenly over all classes; 0 to 1."},
          Field{
              "reduction", &Options::reduction,
              "``\"mean\"`` over the rows that are not ignored, ``\"sum\"`` of all rows, or ``\"none\"``: one loss per "
              "row."},
          Field{"z_loss", &Options::z_loss,
                "Coefficient of the squared logsumexp, which is added to the loss of each row; 0 or more."},
          Field{"tensor_parallel", &Options::tensor_parallel,
                "The classes are sharded over the ranks of tensor_parallel_group, in rank order."},
          Field{"tensor_parallel_group", &Options::tensor_parallel_group, description::kTensorParallelGroup},
          Field{"tensor_parallel_size", &Options::tensor_parallel_size, description::kGroupSize}};
    }
  };
  enum Saved { kInput, kTargets, kStatistics };

  explicit CrossEntropy(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "CrossEntropy"; }
  int extra_inputs() const override { return 1; }
  bool is_index(int) const override { return true; }
  DtypeRule dtype_rule() const override { return DtypeRule::opmath_output; }
  std::vector<std::string> saved_names() const override { return {"input", "targets", "statistics"}; }
  kernels::TierChoice kernel(const TierQuery& q) const override {
    return kernels::choose_vector_tier(q.device, q.dtype);
  }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

  // ---- building blocks of forward and backward, for fused operations ----
  /// The loss for logits of `columns` classes on this rank.
  kernels::CrossEntropyLoss loss(int64_t columns) const;
  /// The targets as int64. Raises unless there is one class index per row of logits of these sizes.
  at::Tensor checked_targets(const at::Tensor& targets, c10::SymIntArrayRef logits) const;
  /// The partials of all classes, from those of parts of this rank's classes, [parts, rows, kNumPartials]. Raises on
  /// every rank if the targets of the ranks differ.
  at::Tensor gather_partials(const at::Tensor& partials, const at::Tensor& targets,
                             const kernels::CrossEntropyLoss& loss) const;
  /// y from the losses of all rows; `like` has the sizes of one loss per row.
  at::Tensor reduce(const at::Tensor& losses, const at::Tensor& rows, const at::Tensor& like) const;
  /// The gradient of the loss of each row, in `dtype`.
  at::Tensor row_gradients(const at::Tensor& dy, const at::Tensor& rows, at::ScalarType dtype) const;

 private:
  comm::Group group() const { return {*options_.tensor_parallel_group, options_.tensor_parallel_size}; }
  bool per_row() const { return options_.reduction == Reduction::none; }

  Options options_;
};

}  // namespace weft::ops

template <>
struct weft::EnumNames<weft::ops::Reduction> {
  static constexpr std::array<const char*, 3> list{"mean", "sum", "none"};
};
