#include "weft/nn/linear.h"

#include "weft/ops/basic_linear.h"
#include "weft/ops/bias.h"

namespace weft::nn {

LinearImpl::LinearImpl(LinearOptions options) : Fusible("Linear"), options_(options) {
  for (const auto& stage : stages()) own_parameters(*stage.op);
}

std::vector<fuser::Stage> LinearImpl::stages() const {
  using Product = ops::BasicLinear;
  std::vector<fuser::Stage> list;
  const Product::Options product{.in_features = options_.in_features,
                                 .out_features = options_.out_features,
                                 .dtype = options_.dtype,
                                 .accumulate_into_main_grad = options_.accumulate_into_main_grad,
                                 .delay_wgrad_compute = options_.delay_wgrad_compute};
  list.push_back({.op = std::make_shared<Product>(product), .in = {}, .out = {}});
  if (options_.bias) {
    const ops::Bias::Options bias{.size = options_.out_features, .dtype = options_.dtype};
    list.push_back({.op = std::make_shared<ops::Bias>(bias), .in = {}, .out = {}});
  }
  return list;
}

void LinearImpl::reset_parameters() {
  for (const auto& stage : stages()) initialize(*stage.op);
}

std::shared_ptr<torch::nn::Module> LinearImpl::clone(const std::optional<at::Device>& device) const {
  auto copy = std::make_shared<LinearImpl>(options_);
  copy->copy_values(*this, device);
  return copy;
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "Linear(in_features=" << options_.in_features << ", out_features=" << options_.out_features
         << ", bias=" << (options_.bias ? "true" : "false") << ")";
}

}  // namespace weft::nn
