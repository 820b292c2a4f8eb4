#include "weft/device/hooks.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <torch/csrc/autograd/engine.h>

#include <optional>

#include "weft/device/devices.h"
#include "weft/device/generator.h"
#include "weft/device/memory.h"
#include "weft/device/symbols.h"

namespace weft::device {
namespace {

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return weft::device::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return weft::device::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  std::string showConfig() const override { return "simulated CUDA devices (torchweft.device)"; }
  int64_t cuFFTGetPlanCacheMaxSize(c10::DeviceIndex) const override { return 0; }
  void cuFFTSetPlanCacheMaxSize(c10::DeviceIndex, int64_t) const override {}
  int64_t cuFFTGetPlanCacheSize(c10::DeviceIndex) const override { return 0; }
  void cuFFTClearPlanCache(c10::DeviceIndex) const override {}
  c10::Device getDeviceFromPtr(void*) const override { return cuda_device(weft::device::current_device()); }
};

std::optional<c10::DeviceType> cuda_accelerator(bool) { return c10::DeviceType::CUDA; }

/// Names the protected member of the engine that its first backward sets, also if no device needs a thread.
struct Engine : torch::autograd::Engine {
  static bool has_started(torch::autograd::Engine& engine) {
    return (engine.*(&Engine::thread_pool_shared_)) != nullptr;
  }
};

}  // namespace

const at::CUDAHooksInterface& hooks() {
  static const Hooks value;
  return value;
}

int replace_hooks() {
  using GetHooks = const at::CUDAHooksInterface& (*)();
  using GetAccelerator = std::optional<c10::DeviceType> (*)(bool);
  const GetHooks get_hooks = &hooks;
  const GetAccelerator get_accelerator = &cuda_accelerator;
  return replace_symbol("_ZN2at6detail12getCUDAHooksEv", reinterpret_cast<void*>(get_hooks)) +
         replace_symbol("_ZN2at11accelerator14getAcceleratorEb", reinterpret_cast<void*>(get_accelerator));
}

bool autograd_has_started() { return Engine::has_started(torch::autograd::Engine::get_default_engine()); }

}  // namespace weft::device
