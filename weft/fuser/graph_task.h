#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace weft::fuser {

/// Called by each forward pass. If it runs inside a backward (checkpointing recomputes activations), records that
/// backward as the outermost one of any backward that this thread starts until it ends.
void track_recompute();

/// Whether this thread executes a backward.
bool in_backward();

/// The id of the backward that this thread executes. A nested backward, as started by reentrant checkpointing, has the
/// id of the outermost one. Raises if the outermost one is unknown.
int64_t outermost_graph_task_id();

/// Whether the backward that this thread executes computes the gradient of `leaf`: all of them, or with
/// torch.autograd.grad and backward(inputs=...) those asked for.
bool computes_gradient_of(const at::Tensor& leaf);

}  // namespace weft::fuser
