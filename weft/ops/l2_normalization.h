#pragma once
#include "weft/ops/operation.h"

namespace weft::ops {

/// y = x·q,  q = 1/√(Σ x² + eps) over the last dimension. Computed in float32 (float64 for float64); autocast does not
/// change the dtype of y.
class L2Normalization final : public Op<L2Normalization> {
 public:
  struct Options {
    double eps = 1e-6;
    std::optional<int64_t> seq_length = {};
    std::optional<int64_t> micro_batch_size = {};
    static constexpr auto fields() {
      return std::tuple{Field{"eps", &Options::eps, "Added to the sum of squares before the square root."},
                        Field{"seq_length", &Options::seq_length,
                              "Transformer Engine's hint for compiling GPU kernels early; has no effect on a CPU."},
                        Field{"micro_batch_size", &Options::micro_batch_size,
                              "Transformer Engine's hint for compiling GPU kernels early; has no effect on a CPU."}};
    }
  };
  enum Saved { kInput, kRnorm };

  explicit L2Normalization(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "L2Normalization"; }
  std::vector<std::string> saved_names() const override { return {"input", "1 / norm"}; }
  DtypeRule dtype_rule() const override { return DtypeRule::input; }
  kernels::TierChoice kernel(const TierQuery& q) const override {
    return kernels::choose_vector_tier(q.device, q.dtype);
  }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  Options options_;
};

}  // namespace weft::ops
