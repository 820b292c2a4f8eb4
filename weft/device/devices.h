#pragma once
#include <c10/core/Device.h>

#include <cstdint>

// The simulated devices: how many there are, and which one is current.

namespace weft::device {

constexpr c10::DeviceIndex kMaxDevices = 16;

/// The number of devices, 0 before `set_device_count`.
c10::DeviceIndex device_count() noexcept;
void set_device_count(c10::DeviceIndex count);

/// The current device of this thread.
c10::DeviceIndex current_device() noexcept;
/// Raises torch's "invalid device ordinal" for an index that does not exist.
void check_device(c10::DeviceIndex index);
c10::DeviceIndex exchange_device(c10::DeviceIndex index);

inline c10::Device cuda_device(c10::DeviceIndex index) { return {c10::DeviceType::CUDA, index}; }
/// The device itself, or the current one if it has no index.
inline c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : cuda_device(current_device());
}

/// The place of a device in an array with one element for each.
inline size_t place(c10::DeviceIndex index) { return static_cast<uint8_t>(index); }

/// Registers the device guard, its streams and its events. Work on a stream is complete when the call returns.
void register_guard();

}  // namespace weft::device
