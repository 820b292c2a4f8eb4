#pragma once
#include "weft/fuser/fuser.h"

namespace torch::autograd {
struct Node;
}

namespace weft::fuser {

/// Runs a plan as one autograd node, or without a node if no gradient is needed.
Tensors run_plan(const std::shared_ptr<const Pipeline>& pipeline, const std::shared_ptr<const Plan>& plan,
                 const at::Tensor& x, ops::Params params, Tensors extras, c10::ArrayRef<ops::Buffers> buffers = {});

/// Runs the backward of such a call once, without autograd's engine, for a caller with a node of its own in the graph.
/// `node` is the grad_fn of an output. Returns the gradients of x, parameters and extra inputs: all that the plan
/// needs, whichever of them the backward that is running uses.
Tensors run_backward_of(torch::autograd::Node& node, Tensors grads);

}  // namespace weft::fuser
