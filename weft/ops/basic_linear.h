#pragma once
#include <array>

#include "weft/comm/group.h"
#include "weft/kernels/gemm.h"
#include "weft/ops/operation.h"

namespace weft::ops {

enum class ParallelMode { column, row };

/// y = x Wᵀ;  dx = dy W;  dW = Σ_rows dyᵀ x. Over p ranks, each with its part of W:
///   column: W is split by rows,    y = x Wᵀ has its part of the columns,  dx is summed over ranks
///   row:    W is split by columns, as x is,  y is summed over ranks
/// With sequence_parallel what is whole on every rank is split by its first dimension: column gathers x and scatters
/// the sum dx, row scatters the sum y and gathers dy.
class BasicLinear final : public Op<BasicLinear> {
 public:
  struct Options {
    int64_t in_features = 0;   // over all ranks
    int64_t out_features = 0;  // over all ranks
    at::ScalarType dtype = at::kFloat;
    std::optional<ParallelMode> tensor_parallel_mode = {};
    std::optional<std::string> tensor_parallel_group = {};
    int64_t tensor_parallel_size = 1;
    bool sequence_parallel = false;
    bool accumulate_into_main_grad = false;
    bool delay_wgrad_compute = false;
    std::optional<std::string> userbuffers_options = {};  // the communication's name
    std::optional<bool> overlap = {};                     // communication under the GEMMs; none: where it pays
    std::optional<int64_t> fan_in = {};  // of the whole layer, for the first weights; none: in_features
    static constexpr auto fields() {
      return std::tuple{Field{"in_features", &Options::in_features, ParamKind::required},
                        Field{"out_features", &Options::out_features, ParamKind::required},
                        Field{"dtype", &Options::dtype},
                        Field{"tensor_parallel_mode", &Options::tensor_parallel_mode},
                        Field{"tensor_parallel_group", &Options::tensor_parallel_group},
                        Field{"tensor_parallel_size", &Options::tensor_parallel_size},
                        Field{"sequence_parallel", &Options::sequence_parallel},
                        Field{"accumulate_into_main_grad", &Options::accumulate_into_main_grad},
                        Field{"delay_wgrad_compute", &Options::delay_wgrad_compute},
                        Field{"userbuffers_options", &Options::userbuffers_options},
                        Field{"overlap", &Options::overlap},
                        Field{"fan_in", &Options::fan_in}};
    }
  };
  enum Saved { kInput, kCastWeight };

  explicit BasicLinear(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "BasicLinear"; }
  std::vector<ParamSpec> params() const override;
  std::vector<std::string> saved_names() const override { return {"input", "weight in compute dtype"}; }
  int weight_slot() const override { return kCastWeight; }
  DtypeRule dtype_rule() const override { return DtypeRule::weight; }
  kernels::TierChoice kernel(c10::DeviceType device, at::ScalarType dtype, bool backward) const override;
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const override;
  Flops flops(const OpPlan& plan, const Spec& x) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override;
  bool delays_wgrad() const override { return options_.delay_wgrad_compute; }
  bool backward_dw(Params params) const override;

  // ---- what this rank holds, and what passes between ranks ----
  int64_t local_in_features() const;
  int64_t local_out_features() const;
  bool parallel() const { return options_.tensor_parallel_mode.has_value(); }
  bool gathers_input() const { return column() && options_.sequence_parallel; }
  bool reduces_output() const { return row(); }
  bool gathers_output_gradient() const { return row() && options_.sequence_parallel; }
  bool reduces_input_gradient() const { return column(); }

  /// Each returns its argument unless the mode asks for the collective; they start it, and may be waited for later.
  comm::Work gather_input(const at::Tensor& x) const;
  comm::Work reduce_output(const at::Tensor& y) const;
  comm::Work gather_output_gradient(const at::Tensor& dy) const;
  comm::Work reduce_input_gradient(const at::Tensor& dx) const;
  /// The saved input, of all ranks; undefined if the weight's gradient is not wanted.
  comm::Work gather_saved_input(OpContext& ctx) const;

  // ---- the parts of forward and backward, for fused operations ----
  /// x and W in the compute dtype; saves what backward reads.
  struct Operands {
    at::Tensor x, w;
  };
  Operands operands(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight) const;
  /// The weight in the compute dtype, as backward reads it.
  const at::Tensor& backward_weight(const OpContext& ctx, Params params) const;
  /// epilogue(x Wᵀ), with x of all ranks. Saves what `backward` reads. Not for a product that is summed over ranks.
  kernels::GemmResult forward_gemm(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                   kernels::Epilogue epilogue) const;
  /// epilogue(dy W), with dx's leading sizes; undefined unless dx is wanted. dy is that of all ranks. Not for a dx that
  /// is summed over ranks.
  kernels::GemmResult input_gradient(OpContext& ctx, const at::Tensor& dy, Params params,
                                     kernels::Epilogue epilogue) const;
  /// Whether the weight's gradient is computed sooner if dy comes in tiles too, by `Frame::packed_grad`.
  bool takes_packed_grad(const OpContext& ctx, const at::Tensor& dy) const;
  /// scale·Σ_rows dyᵀ x to where the weight's gradient goes, if wanted; x is the saved input, dy that of all ranks.
  void weight_gradient(OpContext& ctx, const at::Tensor& dy, double scale = 1) const;
  /// The same with another x, of all ranks; `progress` as in Epilogue.
  void weight_gradient_of(OpContext& ctx, const at::Tensor& dy, const at::Tensor& x, double scale = 1,
                          const std::function<void()>* progress = nullptr) const;

 private:
  bool column() const { return options_.tensor_parallel_mode == ParallelMode::column; }
  bool row() const { return options_.tensor_parallel_mode == ParallelMode::row; }
  comm::Group group() const { return comm::Group(*options_.tensor_parallel_group); }
  void check_input(const at::Tensor& x, const at::Tensor& weight) const;
  kernels::GemmResult local_gemm(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                                 kernels::Epilogue epilogue) const;
  kernels::GemmResult local_input_gradient(OpContext& ctx, const at::Tensor& dy, Params params,
                                           kernels::Epilogue epilogue) const;
  at::Tensor parallel_backward(OpContext& ctx, const at::Tensor& dy, Params params) const;

  Options options_;
};

}  // namespace weft::ops

template <>
struct weft::EnumNames<weft::ops::ParallelMode> {
  static constexpr std::array<const char*, 2> list{"column", "row"};
};
