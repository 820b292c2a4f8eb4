#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>

// Memory of the simulated devices. A storage on a device owns a storage on the CPU with the same bytes, its host
// storage, so that kernels for the CPU can read and write it, and counts it in the statistics of the device.

namespace weft::device {

/// The host storage of a storage on a device. Memory that another library allocated gets one that keeps `storage`.
c10::Storage host_storage(const c10::Storage& storage);

/// A storage on `device` that owns `host`. Raises torch's OutOfMemoryError beyond the limit of the device.
c10::Storage device_storage(c10::Storage host, c10::Device device);

/// A new storage of `bytes` on `device`, uninitialized.
c10::Storage allocate(size_t bytes, c10::Device device);

/// Resizes `storage`, a storage on a device, and keeps its first bytes. Its tensors see the new memory.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

/// Gives `storage` the memory of its host storage, which a kernel has resized.
void follow_host_storage(c10::StorageImpl& storage, const c10::Storage& host);

/// The allocator of the devices, whose statistics count tensors in blocks of 512 bytes, as torch's allocator does.
c10::DeviceAllocator& device_allocator();

/// The memory of each device in bytes: what `torch.cuda.get_device_properties` reports.
void set_total_memory(size_t bytes);
size_t total_memory();

/// The part of its memory that a device may allocate.
void set_memory_fraction(double fraction, c10::DeviceIndex device);
double memory_fraction(c10::DeviceIndex device);

/// Allocates pinned memory: memory of the CPU that knows that it is pinned.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

}  // namespace weft::device
