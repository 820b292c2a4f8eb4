#pragma once
#include <array>

#include "weft/comm/group.h"
#include "weft/kernels/gemm.h"
#include "weft/kernels/quantize.h"
#include "weft/ops/field_descriptions.h"
#include "weft/ops/operation.h"
#include "weft/ops/quantized_gather.h"
#include "weft/ops/saved_recipe.h"

namespace weft::ops {

enum class ParallelMode { column, row };

/// dy of all ranks as the operand of the backward GEMMs.
struct OutputGradient {
  Gradient values;                                    // undefined if the ranks exchanged codes
  std::optional<kernels::QuantizedMatrix> quantized;  // if the recipe quantizes dy
  at::DimVector sizes;

  OutputGradient(Gradient dy) : values(std::move(dy)), sizes(values.value.sizes()) {}
  OutputGradient(const at::Tensor& dy) : OutputGradient(Gradient(dy)) {}
  OutputGradient(Gradient dy, kernels::QuantizedMatrix codes, at::IntArrayRef sizes)
      : values(std::move(dy)), quantized(std::move(codes)), sizes(sizes) {}

  at::ScalarType dtype() const { return quantized ? quantized->dtype : values.value.scalar_type(); }
};

/// y = x Wᵀ;  dx = dy W;  dW = Σ_rows dyᵀ x. With tensor parallelism each rank holds a shard of W:
///   column: W is sharded by rows, y by columns; dx is all-reduced
///   row:    W and x are sharded by columns; y is all-reduced
/// With sequence_parallel the replicated tensors are sharded along dimension 0 instead:
///   column: x is all-gathered, dx is reduce-scattered
///   row:    y is reduce-scattered, dy is all-gathered
/// A recipe quantizes the operands of each GEMM.
class BasicLinear final : public Op<BasicLinear> {
 public:
  struct Options {
    int64_t in_features = 0;
    int64_t out_features = 0;
    at::ScalarType dtype = at::kFloat;
    std::optional<ParallelMode> tensor_parallel_mode = {};
    std::optional<std::string> tensor_parallel_group = {};
    int64_t tensor_parallel_size = 1;
    bool sequence_parallel = false;
    bool accumulate_into_main_grad = false;
    bool delay_wgrad_compute = false;
    std::optional<std::string> userbuffers_options = {};
    std::optional<bool> overlap = {};
    std::optional<int64_t> fan_in = {};
    static constexpr auto fields() {
      return std::tuple{
          Field{"in_features", &Options::in_features, description::kInFeatures, ParamKind::required},
          Field{"out_features", &Options::out_features, description::kOutFeatures, ParamKind::required},
          Field{"dtype", &Options::dtype, description::kDtype},
          Field{"tensor_parallel_mode", &Options::tensor_parallel_mode, description::kTensorParallelMode},
          Field{"tensor_parallel_group", &Options::tensor_parallel_group, description::kTensorParallelGroup},
          Field{"tensor_parallel_size", &Options::tensor_parallel_size, description::kGroupSize},
          Field{"sequence_parallel", &Options::sequence_parallel, description::kSequenceParallel},
          Field{"accumulate_into_main_grad", &Options::accumulate_into_main_grad, description::kAccumulateIntoMainGrad},
          Field{"delay_wgrad_compute", &Options::delay_wgrad_compute, description::kDelayWgradCompute},
          Field{"userbuffers_options", &Options::userbuffers_options, description::kUserbuffersOptions},
          Field{"overlap", &Options::overlap, description::kOverlap},
          Field{"fan_in", &Options::fan_in,
                "Input features of the unsharded layer, for initialization; None means in_features."}};
    }
  };
  enum Saved { kInput, kWeight, kRecipe };

  explicit BasicLinear(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "BasicLinear"; }
  std::vector<ParamSpec> params() const override;
  std::vector<std::string> saved_names() const override {
    return {"input", "weight in compute dtype", kSavedRecipeName};
  }
  int weight_slot() const override { return kWeight; }
  DtypeRule dtype_rule() const override { return DtypeRule::weight; }
  bool quantizes() const override { return true; }
  kernels::TierChoice kernel(const TierQuery& q) const override;
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const override;
  Flops flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override;
  bool delays_wgrad() const override { return options_.delay_wgrad_compute; }
  bool backward_dw(Params params) const override;

  // ---- sharding and communication ----
  int64_t local_in_features() const;
  int64_t local_out_features() const;
  bool parallel() const { return options_.tensor_parallel_mode.has_value(); }
  bool gathers_input() const { return column() && options_.sequence_parallel; }
  bool reduces_output() const { return row(); }
  bool gathers_output_gradient() const { return row() && options_.sequence_parallel; }
  bool reduces_input_gradient() const { return column(); }

  /// Start the collective that the mode requires, to be waited for later; otherwise return the argument.
  comm::Work gather_input(const at::Tensor& x) const;
  comm::Work reduce_output(const at::Tensor& y) const;
  comm::Work gather_output_gradient(const at::Tensor& dy) const;
  comm::Work reduce_input_gradient(const at::Tensor& dx) const;

  // ---- building blocks of forward and backward, for fused operations ----
  /// x and W in the compute dtype. Saves what backward reads.
  struct Operands {
    at::Tensor x, w;
  };
  Operands operands(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight) const;
  /// The weight in the compute dtype, as backward reads it.
  const at::Tensor& backward_weight(const OpContext& ctx, Params params) const;
  /// epilogue(x Wᵀ), with x gathered: with a transport, the rows of other ranks are multiplied as they arrive. Saves
  /// what `backward` reads. Raises if y is reduced over ranks.
  kernels::GemmResult forward_gemm(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                   kernels::Epilogue epilogue, comm::Transport* transport = nullptr) const;
  /// dy of all ranks, quantized if the recipe says so. The packed transpose is kept if dy is not gathered.
  OutputGradient prepare_output_gradient(OpContext& ctx, const Gradient& dy, Params params) const;
  /// epilogue(dy W) with the leading sizes of dx; undefined if dx is not needed. Raises if dx is reduced over ranks.
  kernels::GemmResult input_gradient(OpContext& ctx, const OutputGradient& dy, Params params,
                                     kernels::Epilogue epilogue) const;
  int64_t packed_dy_min_rows(const OpPlan& plan) const override;
  bool uses_packed_dy(const OpPlan& plan, const at::Tensor& dy) const;
  /// dW = scale·Σ_rows dyᵀ x, written to its WgradSink if needed; x is what forward saved.
  void weight_gradient(OpContext& ctx, const OutputGradient& dy, double scale = 1) const;
  /// The same for values of x of all ranks; `progress` as in Epilogue.
  void weight_gradient_of(OpContext& ctx, const OutputGradient& dy, const at::Tensor& x, double scale = 1,
                          const std::function<void()>* progress = nullptr) const;
  /// Whether `weight_gradient_of` can be called with values of x that were computed again: delayed scaling has another
  /// scale by then.
  static bool takes_recomputed_input(const OpPlan& plan) { return !plan.recipe || !plan.recipe->is_delayed(); }
  /// dW as `compute` writes it (see WgradGemm). A delayed one runs after this call, so it owns what it reads.
  void weight_gradient_by(OpContext& ctx, std::function<at::Tensor(const at::Tensor&, bool)> compute) const;

 private:
  bool column() const { return options_.tensor_parallel_mode == ParallelMode::column; }
  bool row() const { return options_.tensor_parallel_mode == ParallelMode::row; }
  comm::Group group() const { return {*options_.tensor_parallel_group, options_.tensor_parallel_size}; }
  void check_input(const at::Tensor& x, const at::Tensor& weight) const;
  kernels::GemmResult local_gemm(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                 kernels::Epilogue epilogue, comm::Transport* transport = nullptr) const;
  kernels::GemmResult local_input_gradient(OpContext& ctx, const OutputGradient& dy, Params params,
                                           kernels::Epilogue epilogue) const;
  /// The same with quantized operands.
  void infer_saved_copies(const OpPlan& plan, const Spec& x, const Spec& weight, Inferred& out) const;
  kernels::GemmResult quantized_gemm(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                     const kernels::Epilogue& epilogue, comm::Transport* transport) const;
  at::ScalarType backward_dtype(const OpContext& ctx, const at::Tensor& dy, Params params) const;
  OutputGradient quantize_output_gradient(OpContext& ctx, const at::Tensor& dy) const;
  /// Whether backward quantizes x once more, because the copy that it reads does not consist of this rank's copy.
  bool requantizes_input(const quant::Recipe& recipe) const {
    return gathers_input() && recipe.input.quantization().block > 0;
  }
  /// epilogue(dy W) as a matrix.
  kernels::GemmResult multiply_by_weight(OpContext& ctx, const OutputGradient& dy, Params params,
                                         const kernels::Epilogue& epilogue) const;
  /// [rows, n] with the leading sizes of `local`, whose first one is multiplied by the ranks if `gathered`.
  at::Tensor restore_gathered(const at::Tensor& matrix, const at::Tensor& local, bool gathered) const;
  /// x of all ranks for the weight gradient: values, or quantized copies, which `copy` describes if they are gathered.
  struct SavedInput {
    comm::Work work;
    bool copies = false;
    std::optional<DistributedCopy> copy = {};
  };
  /// Starts to gather what forward saved; undefined if dW is not needed. `dtype` and `sizes`: of dy of all ranks.
  SavedInput gather_saved_input(OpContext& ctx, at::ScalarType dtype, at::IntArrayRef sizes) const;
  SavedInput gather_saved_copies(OpContext& ctx, at::ScalarType dtype, at::IntArrayRef sizes) const;
  kernels::QuantizedMatrix saved_copies(OpContext& ctx, const OutputGradient& dy, const SavedInput& saved,
                                        const at::Tensor& gathered) const;
  /// Values of x as the recipe quantizes them for the weight gradient; none if that reads the values.
  std::optional<kernels::QuantizedMatrix> requantized_input(OpContext& ctx, const OutputGradient& dy,
                                                            const at::Tensor& x) const;
  void weight_gradient_of_saved(OpContext& ctx, const OutputGradient& dy, SavedInput saved, double scale) const;
  void weight_gradient_of_copies(OpContext& ctx, const OutputGradient& dy, const kernels::QuantizedMatrix& x,
                                 double scale) const;
  void plain_weight_gradient(OpContext& ctx, const Gradient& dy, const at::Tensor& x, double scale,
                             const std::function<void()>* progress) const;

  Options options_;
};

}  // namespace weft::ops

template <>
struct weft::EnumNames<weft::ops::ParallelMode> {
  static constexpr std::array<const char*, 2> list{"column", "row"};
};
