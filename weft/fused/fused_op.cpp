#include "weft/fused/fused_op.h"

#include <typeinfo>

namespace weft::fused {

at::Tensor FusedOp::forward(StepContext&, const at::Tensor&) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, typeid(*this).name(), " has no forward pass.");
}

at::Tensor FusedOp::backward(StepContext&, const at::Tensor&) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, typeid(*this).name(), " has no backward pass.");
}

kernels::Choice FusedOp::kernel(c10::ArrayRef<kernels::Choice> components) const {
  kernels::Choice best;
  for (const auto& part : components)
    if (part.tier < best.tier || (part.tier == best.tier && part.declined.size() > best.declined.size())) best = part;
  return best;
}

}  // namespace weft::fused
