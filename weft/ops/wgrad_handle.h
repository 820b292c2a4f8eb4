#pragma once
#include <ATen/core/Tensor.h>

namespace weft::ops {

// A handle names a Parameter in a compiled program, whose backward must find the Parameter's main_grad: not a copy that
// saved-tensor hooks made, and not the one of forward if it was replaced since. The name is the value of the handle, so
// that a copy of a handle names the same Parameter. A handle requires a gradient, which keeps backward in the program
// if nothing else needs it.

/// The handle of a Parameter, a float64 tensor [1] on the CPU. Created once per Parameter.
at::Tensor main_grad_handle(const at::Tensor& param);

/// The Parameter that a handle, or a copy of it, names. Raises if the value is none or the Parameter no longer exists.
at::Tensor parameter_of(const at::Tensor& handle);

}  // namespace weft::ops
