#pragma once
#include <torch/nn/pimpl.h>

#include "weft/nn/fusible.h"

namespace weft::nn {

struct LinearOptions {
  int64_t in_features = 0, out_features = 0;
  bool bias = true;
  at::ScalarType dtype = at::kFloat;
  bool accumulate_into_main_grad = false;
  bool delay_wgrad_compute = false;
};

/// y = x Wᵀ + b, made of BasicLinear and Bias. Parameters: `weight`, and `bias` if there is one.
class LinearImpl : public Fusible {
 public:
  explicit LinearImpl(LinearOptions options);
  LinearImpl(int64_t in_features, int64_t out_features) : LinearImpl(LinearOptions{in_features, out_features}) {}

  const LinearOptions& options() const { return options_; }
  std::vector<fuser::Stage> stages() const override;
  std::vector<at::Tensor> operands() const override { return parameters(/*recurse=*/false); }
  void reset_parameters() override;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  LinearOptions options_;
};
TORCH_MODULE(Linear);

}  // namespace weft::nn
