#include "weft/fused/fused_op.h"

#include <typeinfo>

namespace weft::fused {

at::Tensor FusedOp::forward(StepContext&, const at::Tensor&) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, typeid(*this).name(), " has no forward pass.");
}

at::Tensor FusedOp::backward(StepContext&, const at::Tensor&) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, typeid(*this).name(), " has no backward pass.");
}

}  // namespace weft::fused
