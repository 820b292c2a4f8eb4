#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "weft/device/host_alias.h"

// Adapters compute on the CPU, on tensors that share the caller's memory, and return tensors on the caller's device.

namespace weft::te {

/// The tensor of the CPU with the memory of `t`, which is on a simulated device, or `t` itself. Undefined stays so.
inline at::Tensor host(const at::Tensor& t) { return t.defined() ? device::host_alias(t) : t; }
inline at::Tensor host(const std::optional<at::Tensor>& t) { return t ? host(*t) : at::Tensor(); }

/// `result`, which a kernel has just allocated on the CPU, as a tensor on `device`. Undefined stays so.
inline at::Tensor on_device(at::Tensor result, c10::Device device) {
  return result.defined() && device.is_cuda() ? device::to_device(std::move(result), device) : result;
}

}  // namespace weft::te
