#pragma once
#include "weft/fuser/plan.h"

namespace weft::fuser {

/// Runs the forward plan. Reads the caller's extra inputs from `frame.extra_in` and leaves extra outputs in
/// `frame.extra_out`.
at::Tensor run_forward(const Pipeline& pipeline, const Plan& plan, ops::Frame& frame, at::Tensor x);

/// Runs the backward plan from the last step to the first. Reads the gradients of extra outputs from `frame.extra_out`
/// (undefined: zero) and leaves those of extra inputs in `frame.extra_in`. Releases saved tensors after their last use.
at::Tensor run_backward(const Pipeline& pipeline, const Plan& plan, ops::Frame& frame, at::Tensor dy);

}  // namespace weft::fuser
