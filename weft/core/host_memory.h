#pragma once
#include <c10/core/Device.h>

namespace weft {

/// Whether the CUDA devices of this process are simulated (weft/device): their tensors lie in host memory.
bool cuda_is_simulated();
void set_cuda_is_simulated();

/// Whether kernels for the CPU can read the memory of tensors on this device.
inline bool in_host_memory(c10::DeviceType device) {
  return device == c10::DeviceType::CPU || (device == c10::DeviceType::CUDA && cuda_is_simulated());
}
inline bool in_host_memory(c10::Device device) { return in_host_memory(device.type()); }

}  // namespace weft
