#include "weft/fused/fused_op.h"

#include <typeinfo>

namespace weft::fused {

at::Tensor FusedOp::forward(StepContext&, const at::Tensor&) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, typeid(*this).name(), " does not implement forward.");
}

ops::Gradient FusedOp::backward(StepContext&, const ops::Gradient&) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, typeid(*this).name(), " does not implement backward.");
}

kernels::TierChoice FusedOp::kernel(c10::ArrayRef<kernels::TierChoice> components) const {
  kernels::TierChoice best;
  for (const auto& part : components)
    if (part.tier < best.tier ||
        (part.tier == best.tier && part.rejection_reason.size() > best.rejection_reason.size()))
      best = part;
  return best;
}

}  // namespace weft::fused
