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
  bool sequence_parallel = false;
  bool replicated_bias = false;  // mode row: one replicated bias, added after the reduction; else one bias per rank
  std::optional<std::string> userbuffers_options = {};
  std::optional<bool> overlap = {};
};

/// y = x Wᵀ + b, composed of BasicLinear, Bias and, in mode row, the reduction over ranks. Parameters: `weight` and, if
/// there is one, `bias`; each rank holds its shard.
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
  ops::OpPtr basic_linear() const;
  ops::OpPtr bias() const;
  ops::OpPtr reduction() const;

  LinearOptions options_;
  int64_t ranks_ = 1;
};
TORCH_MODULE(Linear);

}  // namespace weft::nn
