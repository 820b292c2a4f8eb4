#pragma once
#include <torch/nn/pimpl.h>

#include "weft/nn/fusible.h"
#include "weft/ops/basic_linear.h"

namespace weft::nn {

struct LinearOptions {
  int64_t in_features = 0, out_features = 0;  // of the unsharded layer
  bool bias = true;
  at::ScalarType dtype = at::kFloat;
  bool accumulate_into_main_grad = false;
  bool delay_wgrad_compute = false;
  std::optional<ops::ParallelMode> tensor_parallel_mode = {};
  std::optional<std::string> tensor_parallel_group = {};  // its name in the c10d group registry
  int64_t tensor_parallel_size = 1;                       // 1: use the size of the group
  bool sequence_parallel = false;
  bool replicated_bias = false;  // mode row: one replicated bias, added after the reduction; else one bias per rank
  std::optional<std::string> userbuffers_options = {};
  std::optional<bool> overlap = {};
  static constexpr auto fields() {
    namespace description = ops::description;
    return std::tuple{
        Field{"in_features", &LinearOptions::in_features, description::kInFeatures},
        Field{"out_features", &LinearOptions::out_features, description::kOutFeatures},
        Field{"bias", &LinearOptions::bias, "Add a bias."},
        Field{"dtype", &LinearOptions::dtype, description::kDtype},
        Field{"accumulate_into_main_grad", &LinearOptions::accumulate_into_main_grad,
              description::kAccumulateIntoMainGrad},
        Field{"delay_wgrad_compute", &LinearOptions::delay_wgrad_compute, description::kDelayWgradCompute},
        Field{"tensor_parallel_mode", &LinearOptions::tensor_parallel_mode, description::kTensorParallelMode},
        Field{"tensor_parallel_group", &LinearOptions::tensor_parallel_group, description::kTensorParallelGroup},
        Field{"tensor_parallel_size", &LinearOptions::tensor_parallel_size, description::kGroupSize},
        Field{"sequence_parallel", &LinearOptions::sequence_parallel, description::kSequenceParallel},
        Field{
            "replicated_bias", &LinearOptions::replicated_bias,
            "Row mode only: all ranks hold the same bias, added after the reduction, so that training matches a single "
            "process. Otherwise each rank has its own bias and the biases are summed with the output."},
        Field{"userbuffers_options", &LinearOptions::userbuffers_options, description::kUserbuffersOptions},
        Field{"overlap", &LinearOptions::overlap, description::kOverlap}};
  }
};

/// The basic operations of a linear, in order:
///   no mode, or column    BasicLinear, Bias
///   row                   BasicLinear of this rank's in_features, Bias, reduction over ranks
///   row, replicated_bias  BasicLinear of this rank's in_features, reduction over ranks, Bias
/// The reduction is an AllReduce, or with sequence_parallel a ReduceScatter. Without `bias` there is no Bias.
std::vector<ops::OpPtr> linear_ops(const LinearOptions& options);

/// y = x Wᵀ + b, composed of `linear_ops`. Parameters: `weight` and, if there is one, `bias`; each rank holds its
/// shard.
class LinearImpl : public Fusible {
 public:
  explicit LinearImpl(LinearOptions options);
  LinearImpl(int64_t in_features, int64_t out_features) : LinearImpl(LinearOptions{in_features, out_features}) {}

  const LinearOptions& options() const { return options_; }
  std::vector<fuser::Stage> stages() const override;
  std::vector<at::Tensor> op_parameters() const override { return parameters(/*recurse=*/false); }
  void reset_parameters() override;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  LinearOptions options_;
};
TORCH_MODULE(Linear);

}  // namespace weft::nn
