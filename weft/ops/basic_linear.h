#pragma once
#include <array>

#include "weft/kernels/gemm.h"
#include "weft/ops/operation.h"

namespace weft::ops {

enum class ParallelMode { column, row };

/// y = x Wᵀ;  dx = dy W;  dW = Σ_rows dyᵀ x.
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
    std::optional<std::string> userbuffers_options = {};  // the communication's name
    static constexpr auto fields() {
      return std::tuple{Field{"in_features", &Options::in_features, Given::always},
                        Field{"out_features", &Options::out_features, Given::always},
                        Field{"dtype", &Options::dtype},
                        Field{"tensor_parallel_mode", &Options::tensor_parallel_mode},
                        Field{"tensor_parallel_group", &Options::tensor_parallel_group},
                        Field{"tensor_parallel_size", &Options::tensor_parallel_size},
                        Field{"sequence_parallel", &Options::sequence_parallel},
                        Field{"accumulate_into_main_grad", &Options::accumulate_into_main_grad},
                        Field{"delay_wgrad_compute", &Options::delay_wgrad_compute},
                        Field{"userbuffers_options", &Options::userbuffers_options}};
    }
  };
  enum Saved { kInput, kCastWeight };

  explicit BasicLinear(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "BasicLinear"; }
  std::vector<ParamSpec> params() const override;
  std::vector<std::string> saved_names() const override { return {"input", "weight in compute dtype"}; }
  DtypeRule dtype_rule() const override { return DtypeRule::weight; }
  kernels::Choice kernel(c10::DeviceType device, at::ScalarType dtype, bool backward) const override;
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override;

  /// epilogue(x Wᵀ). Saves what `backward` reads.
  kernels::GemmResult product(OpContext& ctx, const at::Tensor& x, const at::Tensor& weight,
                              kernels::Epilogue epilogue) const;
  /// epilogue(dy W), with dx's leading sizes; undefined unless dx is wanted.
  kernels::GemmResult input_gradient(OpContext& ctx, const at::Tensor& dy, Params params,
                                     kernels::Epilogue epilogue) const;
  /// scale·Σ_rows dyᵀ x to where the weight's gradient goes, if wanted; x is the saved input.
  void weight_gradient(OpContext& ctx, const at::Tensor& dy, double scale = 1) const;
  /// The same with another x.
  void weight_gradient_of(OpContext& ctx, const at::Tensor& dy, const at::Tensor& x, double scale = 1) const;
  /// Runs the oldest delayed weight gradient; false if none waits. To be called below autograd.
  bool backward_dw(const at::Tensor& weight) const;

 private:
  Options options_;
};

}  // namespace weft::ops

template <>
struct weft::Words<weft::ops::ParallelMode> {
  static constexpr std::array<const char*, 2> list{"column", "row"};
};
