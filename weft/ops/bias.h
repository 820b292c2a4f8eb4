#pragma once
#include "weft/ops/field_descriptions.h"
#include "weft/ops/operation.h"

namespace weft::ops {

/// y = x + b, with b broadcast over the rows of x. Under autocast b is cast to the dtype of x; otherwise torch's type
/// promotion applies. tensor_parallel: b is sharded, `size` is the total. sequence_parallel: x holds this rank's rows,
/// b is replicated, and db is all-reduced.
class Bias final : public Op<Bias> {
 public:
  struct Options {
    int64_t size = 0;
    at::ScalarType dtype = at::kFloat;
    bool tensor_parallel = false;
    std::optional<std::string> tensor_parallel_group = {};
    int64_t tensor_parallel_size = 1;
    bool sequence_parallel = false;
    static constexpr auto fields() {
      return std::tuple{
          Field{"size", &Options::size,
                "Size of the last dimension of the input; with tensor_parallel the total over all ranks.",
                ParamKind::required},
          Field{"dtype", &Options::dtype, description::kDtype},
          Field{"tensor_parallel", &Options::tensor_parallel,
                "Shard the bias over the ranks of tensor_parallel_group."},
          Field{"tensor_parallel_group", &Options::tensor_parallel_group, description::kTensorParallelGroup},
          Field{"tensor_parallel_size", &Options::tensor_parallel_size, description::kGroupSize},
          Field{"sequence_parallel", &Options::sequence_parallel,
                "Each rank has its own rows of the input and the same bias; the bias gradient is all-reduced."}};
    }
  };
  explicit Bias(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "Bias"; }
  std::vector<ParamSpec> params() const override;
  DtypeRule dtype_rule() const override { return DtypeRule::promote; }
  kernels::TierChoice kernel(const TierQuery& q) const override {
    return q.backward ? kernels::choose_vector_tier(q.device, q.dtype) : kernels::TierChoice{};
  }
  Inferred infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override;
  /// Sets db from this rank's Σ_rows dy, reduced over ranks if sequence_parallel.
  void set_gradient(OpContext ctx, at::Tensor local_db) const;

 private:
  Options options_;
};

}  // namespace weft::ops
