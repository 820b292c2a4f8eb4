#include "weft/device/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <mutex>
#include <optional>

#include "weft/device/devices.h"

namespace weft::device {
namespace {

/// A generator of a device that draws from one of the CPU.
struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(c10::DeviceIndex device, at::Generator generator)
      : GeneratorImpl(cuda_device(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(std::move(generator)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  /// Shares the state from now on, as the generators of CUDA graphs do.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    const auto* other = dynamic_cast<const DeviceGenerator*>(state.get());
    TORCH_CHECK_VALUE(other, "graphsafe_set_state: expected a generator of a simulated device.");
    host = other->host;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<DeviceGenerator>(device().index(), host);
  }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), host.clone()); }

  at::Generator host;
};

at::Generator make(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

c10::DeviceIndex index_or_current(c10::DeviceIndex device) {
  if (device < 0) return current_device();
  check_device(device);
  return device;
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = new std::array<std::optional<at::Generator>, kMaxDevices>;
  static std::mutex mutex;
  const auto index = index_or_current(device);
  std::lock_guard lock(mutex);
  auto& generator = (*generators)[place(index)];
  if (!generator) generator = make(index);
  return *generator;
}

at::Generator new_generator(c10::DeviceIndex device) { return make(index_or_current(device)); }

const at::Generator& host_generator(const at::Generator& generator) {
  return static_cast<const DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

}  // namespace weft::device
