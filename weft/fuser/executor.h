#pragma once
#include "weft/fuser/plan.h"

namespace weft::fuser {

/// Runs the forward plan. Extra inputs from the caller are in `frame.extra_in`; extra outputs end in `frame.extra_out`.
at::Tensor run_forward(const Pipeline& pipeline, const Plan& plan, ops::Frame& frame, at::Tensor x);

/// Runs the backward plan in reverse. Gradients of extra outputs are in `frame.extra_out`, an undefined one is zero;
/// those of extra inputs end in `frame.extra_in`. Drops saved tensors from the frame as soon as they were used.
at::Tensor run_backward(const Pipeline& pipeline, const Plan& plan, ops::Frame& frame, at::Tensor dy);

}  // namespace weft::fuser
