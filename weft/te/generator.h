#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <optional>

#include "weft/device/devices.h"
#include "weft/device/generator.h"

// Random numbers of a device, which the generator of the CPU behind it draws.

namespace weft::te {

/// The generator of the CPU behind `given`, or behind the default generator of `device`.
inline at::Generator host_generator(c10::Device device, const std::optional<at::Generator>& given = {}) {
  const auto& generator = given              ? *given
                          : device.is_cuda() ? device::default_generator(device.index())
                                             : at::detail::getDefaultCPUGenerator();
  return generator.device().is_cuda() ? device::host_generator(generator) : generator;
}

/// The next 64 random bits of `generator`, one of the CPU.
inline int64_t draw_seed(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return static_cast<int64_t>(at::check_generator<at::CPUGeneratorImpl>(generator)->random64());
}

}  // namespace weft::te
