#pragma once
#include "weft/kernels/grouped.h"
#include "weft/ops/field_descriptions.h"
#include "weft/ops/operation.h"
#include "weft/ops/saved_recipe.h"
#include "weft/ops/wgrad_sink.h"

namespace weft::ops {

/// Grouped GEMM: a separate weight for each group of rows. For the rows r of group g
///   y_r = W_g x_r + c_r·b_g;  dx_r = dy_r W_g;  dW_g = Σ_{r∈g} dy_rᵀ x_r;  db_g = Σ_{r∈g} c_r·dy_r;  dc_r = dy_r·b_g
/// where c_r is 1, or with scale_bias the second extra input. The first extra input holds the row count of each group
/// (split sizes); only kernels read it. Rows after the last group are ignored and are 0 in y and dx.
class GroupedLinear final : public Op<GroupedLinear> {
 public:
  struct Options {
    int64_t num_groups = 0;
    int64_t in_features = 0;
    int64_t out_features = 0;
    bool bias = true;
    at::ScalarType dtype = at::kFloat;
    bool accumulate_into_main_grad = false;
    bool single_grouped_weight = false;
    bool single_grouped_bias = false;
    bool delay_wgrad_compute = false;
    bool scale_bias = false;
    bool split_path = false;
    static constexpr auto fields() {
      return std::tuple{
          Field{"num_groups", &Options::num_groups, "Number of groups (experts).", ParamKind::required},
          Field{"in_features", &Options::in_features, "Size of the last dimension of the input.", ParamKind::required},
          Field{"out_features", &Options::out_features, "Size of the last dimension of the output.",
                ParamKind::required},
          Field{"bias", &Options::bias, "Add a bias, one per group."},
          Field{"dtype", &Options::dtype, description::kDtype},
          Field{"accumulate_into_main_grad", &Options::accumulate_into_main_grad, description::kAccumulateIntoMainGrad},
          Field{"single_grouped_weight", &Options::single_grouped_weight,
                "Hold all weights in one parameter ``weight`` instead of ``weight0``, ``weight1`` and so on."},
          Field{"single_grouped_bias", &Options::single_grouped_bias,
                "Hold all biases in one parameter ``bias`` instead of ``bias0``, ``bias1`` and so on."},
          Field{"delay_wgrad_compute", &Options::delay_wgrad_compute, description::kDelayWgradCompute},
          Field{"scale_bias", &Options::scale_bias,
                "Take a second extra input with a factor for the bias of each row."},
          Field{"split_path", &Options::split_path,
                "Run one GEMM per group instead of the grouped kernel, as a numerical reference."}};
    }
  };
  enum Saved { kInput, kSplits, kScales, kCastWeight, kRecipe };
  static constexpr int64_t kMaxGroups = 1 << 16;
  enum Extra { kSplitSizes, kBiasScales };

  explicit GroupedLinear(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "GroupedLinear"; }
  std::vector<ParamSpec> params() const override;
  int extra_inputs() const override { return scales_bias() ? 2 : 1; }
  bool is_index(int extra) const override { return extra == kSplitSizes; }
  bool takes_buffers() const override { return true; }
  std::vector<std::string> saved_names() const override {
    return {"input", "splits", "scales", "weights in compute dtype", kSavedRecipeName};
  }
  DtypeRule dtype_rule() const override { return DtypeRule::weight; }
  bool quantizes() const override { return true; }
  kernels::TierChoice kernel(const TierQuery& q) const override;
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra,
                 c10::ArrayRef<Spec> params) const override;
  Flops flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override;
  bool delays_wgrad() const override { return options_.delay_wgrad_compute; }
  bool backward_dw(Params params) const override;

  // ---- building blocks of forward and backward, for fused operations ----
  bool scales_bias() const { return options_.bias && options_.scale_bias; }
  /// Index of the first weight and of the first bias in `params()`.
  int first_weight() const;
  int first_bias() const;
  int num_weights() const { return options_.single_grouped_weight ? 1 : static_cast<int>(options_.num_groups); }
  int num_biases() const {
    return !options_.bias ? 0 : options_.single_grouped_bias ? 1 : static_cast<int>(options_.num_groups);
  }
  bool needs_weight_grad(const OpContext& ctx) const;

  /// y = W_g x_r + c_r·b_g as a matrix, in the caller's buffer if there is one, and x as backward reads it. Saves
  /// everything that backward reads except x.
  struct ForwardResult {
    at::Tensor y, x;
  };
  ForwardResult forward_gemm(OpContext& ctx, const at::Tensor& x, Params params) const;
  /// The result of `forward_gemm` or `differentiate`, reshaped to the leading sizes of `like`.
  at::Tensor finish_output(const OpContext& ctx, const at::Tensor& y, const at::Tensor& like) const;
  at::Tensor finish_input_gradient(const OpContext& ctx, const at::Tensor& dx, const at::Tensor& like) const;
  /// dy as a matrix in the compute dtype; a copy if it overlaps the caller's buffer for dx.
  at::Tensor prepare_output_gradient(const OpContext& ctx, const at::Tensor& dy, Params params) const;
  /// Computes all needed gradients from dy (see `prepare_output_gradient`) and the input x of the GEMM. Returns dx as a
  /// matrix, in the caller's buffer if there is one.
  at::Tensor differentiate(OpContext& ctx, const at::Tensor& dy, Params params, const at::Tensor& x) const;

 private:
  void check_input(const at::Tensor& x) const;
  void check_parameters(const OpContext& ctx, const at::Tensor& x, Params params) const;
  void check_splits(const at::Tensor& splits, const at::Tensor& x) const;
  void check_buffer(const OpContext& ctx, const char* what, const at::Tensor& buffer, at::IntArrayRef sizes,
                    at::ScalarType dtype, const at::Tensor& x, Params params) const;
  kernels::GroupedMatrix biases_of(Params params) const;
  kernels::GroupedMatrix weights_of(Params params, at::ScalarType dtype, at::Tensor& cast) const;
  void check_buffers(const OpContext& ctx, const at::Tensor& x, Params params) const;
  void bias_gradient(OpContext& ctx, const at::Tensor& dy, Params params) const;
  at::Tensor input_gradient_gemm(OpContext& ctx, const at::Tensor& dy, Params params) const;
  void weight_gradient(OpContext& ctx, const at::Tensor& dy, const at::Tensor& x) const;
  kernels::GroupedPath path() const {
    return options_.split_path ? kernels::GroupedPath::split : kernels::GroupedPath::best;
  }
  /// How the recipe of a call quantizes dy and the other operand of a backward GEMM; nullopt: it does not.
  std::optional<kernels::GroupedQuantization> backward_quantization(const OpContext& ctx,
                                                                    quant::Quantizer quant::Recipe::* other) const;
  WgradOptions wgrad() const {
    return {.accumulate = options_.accumulate_into_main_grad, .delay = options_.delay_wgrad_compute};
  }

  Options options_;
};

}  // namespace weft::ops
