#pragma once
#include "weft/kernels/activation.h"
#include "weft/ops/field_descriptions.h"
#include "weft/ops/operation.h"

namespace weft::ops {

/// y[row] = s[row]·act(x[row]), where the extra input s holds one value per row of x, in any shape (the routing
/// probabilities of a mixture of experts). s keeps its dtype, and the product is rounded once. In the equations of the
/// gated activations below, a and b are the halves of x[row], or its alternating blocks with `glu_interleave_size`.
class ScaledActivation : public BasicOp {
 public:
  enum Saved { kInput, kScales };

  const kernels::Act& act() const { return act_; }
  int extra_inputs() const override { return 1; }
  DtypeRule dtype_rule() const override { return DtypeRule::autocast; }
  std::vector<std::string> saved_names() const override { return {"input", "scales"}; }
  kernels::TierChoice kernel(const TierQuery& q) const override {
    return kernels::choose_vector_tier(q.device, q.dtype);
  }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override;

  /// Raises ValueError unless there is one scale per row of x.
  void check_scales(const at::Tensor& x, const at::Tensor& scales) const;

 protected:
  explicit ScaledActivation(kernels::Act act) : act_(act) {}

 private:
  /// True if the operation runs only inside a fused grouped MLP, which recomputes the activation in backward.
  virtual bool fused_only() const { return false; }

  kernels::Act act_;
};

/// y[row] = s[row]·max(x[row], 0)².
class ScaledSReLU final : public ScaledActivation {
 public:
  struct Options {
    bool activation_recompute_in_mlp = false;
    static constexpr auto fields() {
      return std::tuple{
          Field{"activation_recompute_in_mlp", &Options::activation_recompute_in_mlp, description::kRecompute}};
    }
  };
  explicit ScaledSReLU(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "ScaledSReLU"; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }

 private:
  bool fused_only() const override { return options_.activation_recompute_in_mlp; }

  Options options_;
};

/// y[row] = s[row]·(c·tanh(max(x[row], 0)/c))²,  c = tanh_clamp_scale.
class ScaledTanhSReLU final : public ScaledActivation {
 public:
  struct Options {
    double tanh_clamp_scale = 0;
    bool activation_recompute_in_mlp = false;
    static constexpr auto fields() {
      return std::tuple{
          Field{"tanh_clamp_scale", &Options::tanh_clamp_scale, "The bound c of c·tanh(max(x, 0)/c).",
                ParamKind::required},
          Field{"activation_recompute_in_mlp", &Options::activation_recompute_in_mlp, description::kRecompute}};
    }
  };
  explicit ScaledTanhSReLU(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "ScaledTanhSReLU"; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }

 private:
  bool fused_only() const override { return options_.activation_recompute_in_mlp; }

  Options options_;
};

/// SwiGLU: y[row] = s[row]·a·σ(a)·b.
class ScaledSwiGLU final : public ScaledActivation {
 public:
  struct Options {
    std::optional<int64_t> glu_interleave_size = {};
    bool activation_recompute_in_mlp = false;
    static constexpr auto fields() {
      return std::tuple{
          Field{"glu_interleave_size", &Options::glu_interleave_size, description::kGluInterleaveSize,
                ParamKind::positional},
          Field{"activation_recompute_in_mlp", &Options::activation_recompute_in_mlp, description::kRejectedRecompute}};
    }
  };
  explicit ScaledSwiGLU(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "ScaledSwiGLU"; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }

 private:
  Options options_;
};

/// SiTUGLU: y[row] = s[row]·beta1·tanh(a/beta1)·σ(a)·beta2·tanh(b/beta2).
class ScaledSiTUGLU final : public ScaledActivation {
 public:
  struct Options {
    std::optional<int64_t> glu_interleave_size = {};
    bool activation_recompute_in_mlp = false;
    double beta1 = 4.0;
    double beta2 = 25.0;
    static constexpr auto fields() {
      return std::tuple{
          Field{"glu_interleave_size", &Options::glu_interleave_size, description::kGluInterleaveSize,
                ParamKind::positional},
          Field{"activation_recompute_in_mlp", &Options::activation_recompute_in_mlp, description::kRejectedRecompute},
          Field{"beta1", &Options::beta1, description::kBeta1}, Field{"beta2", &Options::beta2, description::kBeta2}};
    }
  };
  explicit ScaledSiTUGLU(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "ScaledSiTUGLU"; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }

 private:
  Options options_;
};

/// ClampedSwiGLU: y[row] = s[row]·ā·σ(alpha·ā)·(clamp(b, -limit, limit) + glu_linear_offset),  ā = min(a, limit).
class ScaledClampedQGeGLU final : public ScaledActivation {
 public:
  struct Options {
    std::optional<int64_t> glu_interleave_size = {};
    bool activation_recompute_in_mlp = false;
    double limit = 7.0;
    double alpha = 1.702;
    double glu_linear_offset = 1.0;
    static constexpr auto fields() {
      return std::tuple{
          Field{"glu_interleave_size", &Options::glu_interleave_size, description::kGluInterleaveSize,
                ParamKind::positional},
          Field{"activation_recompute_in_mlp", &Options::activation_recompute_in_mlp, description::kRejectedRecompute},
          Field{"limit", &Options::limit, description::kLimit}, Field{"alpha", &Options::alpha, description::kAlpha},
          Field{"glu_linear_offset", &Options::glu_linear_offset, description::kGluLinearOffset}};
    }
  };
  explicit ScaledClampedQGeGLU(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "ScaledClampedQGeGLU"; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }

 private:
  Options options_;
};

}  // namespace weft::ops
