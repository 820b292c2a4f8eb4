#include "weft/device/profiler.h"

#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <memory>

#include "weft/device/devices.h"

namespace weft::device {
namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

struct Stubs final : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    if (device) *device = current_device();
    const auto now = c10::getTime();
    *event = std::make_shared<int64_t>(now);
    if (cpu_ns) *cpu_ns = now;
  }
  float elapsed(const ProfilerVoidEventStub* from, const ProfilerVoidEventStub* to) const override {
    const auto time = [](const ProfilerVoidEventStub& event) { return *static_cast<const int64_t*>(event.get()); };
    return static_cast<float>(time(*to) - time(*from)) / 1000;
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> run) const override {
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) run(i);
  }
  void synchronize() const override {}
};

}  // namespace

void register_profiler() {
  static Stubs stubs;
  torch::profiler::impl::registerCUDAMethods(&stubs);
}

}  // namespace weft::device
