#pragma once
#include "weft/ops/field_descriptions.h"
#include "weft/ops/operation.h"

namespace weft::ops {

/// The fields of both norms.
template <class Options>
constexpr auto norm_fields() {
  return std::tuple{
      Field{"normalized_shape", &Options::normalized_shape,
            "Trailing dimensions of the input over which the statistics are computed; an int means the last dimension.",
            ParamKind::required},
      Field{"eps", &Options::eps, "Added to the variance (RMSNorm: the mean square) before the square root."},
      Field{"dtype", &Options::dtype, description::kDtype},
      Field{"zero_centered_gamma", &Options::zero_centered_gamma,
            "Scale by 1 + weight instead of weight; the weight is then initialized to zeros."},
      Field{"sm_margin", &Options::sm_margin,
            "GPU multiprocessors to leave free, in Python also a dict per pass; has no effect on a CPU."}};
}

struct NormOptions {
  std::vector<int64_t> normalized_shape = {};
  double eps = 1e-5;
  at::ScalarType dtype = at::kFloat;
  bool zero_centered_gamma = false;
  int64_t sm_margin = 0;
  static constexpr auto fields() { return norm_fields<NormOptions>(); }
};

/// NormOptions and `bias`. Not derived from NormOptions, so that designated initializers can set all fields.
struct LayerNormOptions {
  std::vector<int64_t> normalized_shape = {};
  double eps = 1e-5;
  at::ScalarType dtype = at::kFloat;
  bool zero_centered_gamma = false;
  int64_t sm_margin = 0;
  bool bias = true;
  static constexpr auto fields() {
    return std::tuple_cat(norm_fields<LayerNormOptions>(),
                          std::tuple{Field{"bias", &LayerNormOptions::bias, "Add a bias β; False means β = 0."}});
  }
};

/// Base of LayerNorm and RMSNorm. A row spans the trailing dimensions `normalized_shape` of x. γ is the weight; γ' is
/// γ, or 1 + γ with `zero_centered_gamma`. Mean and rstd are float32 (float64 for float64 inputs).
class NormOp : public BasicOp {
 public:
  using Options = NormOptions;

  const Options& options() const { return options_; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }
  DtypeRule dtype_rule() const override { return DtypeRule::weight; }
  kernels::TierChoice kernel(const TierQuery& q) const override {
    return kernels::choose_vector_tier(q.device, q.dtype);
  }
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override {
    return gradient(ctx, dy, params, {}, /*reuse=*/false);
  }

  /// As `backward`, but returns dx + addend. `addend` has the shape of x or is undefined. With `reuse` the result may
  /// be written into dy.
  virtual at::Tensor gradient(OpContext& ctx, const at::Tensor& dy, Params params, const at::Tensor& addend,
                              bool reuse) const = 0;
  /// Recomputes y from the saved input.
  virtual at::Tensor recompute(const OpContext& ctx, Params params) const = 0;

 protected:
  NormOp(std::string_view name, Options options);

 private:
  Options options_;
};

/// y = (x - mean)·rstd·γ' + β,  rstd = 1/√(var(x) + eps) over each row.
class LayerNorm final : public NormOp {
 public:
  using Options = LayerNormOptions;
  enum Param { kWeight, kBias };
  enum Saved { kInput, kMean, kRstd };

  explicit LayerNorm(const Options& o)
      : NormOp("LayerNorm", {o.normalized_shape, o.eps, o.dtype, o.zero_centered_gamma, o.sm_margin}), options_(o) {}

  const Options& options() const { return options_; }
  std::string_view name() const override { return "LayerNorm"; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }
  std::vector<ParamSpec> params() const override;
  std::vector<std::string> saved_names() const override { return {"input", "mean", "rstd"}; }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor gradient(OpContext& ctx, const at::Tensor& dy, Params params, const at::Tensor& addend,
                      bool reuse) const override;
  at::Tensor recompute(const OpContext& ctx, Params params) const override;

 private:
  Options options_;
};

/// y = x·rstd·γ',  rstd = 1/√(mean(x²) + eps) over each row.
class RMSNorm final : public NormOp {
 public:
  enum Param { kWeight };
  enum Saved { kInput, kRstd };

  explicit RMSNorm(Options options) : NormOp("RMSNorm", std::move(options)) {}

  std::string_view name() const override { return "RMSNorm"; }
  std::vector<ParamSpec> params() const override;
  std::vector<std::string> saved_names() const override { return {"input", "rstd"}; }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor gradient(OpContext& ctx, const at::Tensor& dy, Params params, const at::Tensor& addend,
                      bool reuse) const override;
  at::Tensor recompute(const OpContext& ctx, Params params) const override;
};

}  // namespace weft::ops
