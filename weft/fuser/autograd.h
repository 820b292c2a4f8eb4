#pragma once
#include "weft/fuser/fuser.h"

namespace weft::fuser {

/// Runs a plan as one autograd node, or without a node if no gradient is needed.
Tensors run_plan(const std::shared_ptr<const Pipeline>& pipeline, const std::shared_ptr<const Plan>& plan,
                 const at::Tensor& x, ops::Params params, Tensors extras, c10::ArrayRef<ops::Buffers> buffers = {});

}  // namespace weft::fuser
