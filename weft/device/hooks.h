#pragma once
#include <ATen/detail/CUDAHooksInterface.h>

namespace weft::device {

/// What torch asks of CUDA from code that is compiled without it.
const at::CUDAHooksInterface& hooks();

/// Makes torch, which is loaded already, use `hooks` and take CUDA for the accelerator. Returns how many references
/// were replaced.
int replace_hooks();

/// Whether autograd has started its threads, one for each device that existed then.
bool autograd_has_started();

}  // namespace weft::device
