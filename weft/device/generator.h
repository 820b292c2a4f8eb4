#pragma once
#include <ATen/core/Generator.h>

// Random generators of the simulated devices: each device has a default one, apart from that of the CPU. Their numbers
// are those of the CPU's generator with the same seed, not those of a GPU.

namespace weft::device {

/// The default generator of a device.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

/// The generator that kernels for the CPU draw from in place of `generator`, one of a simulated device.
const at::Generator& host_generator(const at::Generator& generator);

}  // namespace weft::device
