#include "weft/device/devices.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

namespace weft::device {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

std::atomic<DeviceIndex> devices{0};
std::atomic<c10::StreamId> last_stream{0};
thread_local DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kMaxDevices> current_stream{};

/// An event holds the time at which it was recorded; 0: not yet.
struct Event {
  std::chrono::steady_clock::time_point recorded;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  Device getDevice() const override { return cuda_device(current); }
  Device exchangeDevice(Device d) const override {
    return cuda_device(exchange_device(d.has_index() ? d.index() : current));
  }
  void setDevice(Device d) const override { exchangeDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.has_index() && d.index() < device_count()) current = d.index();
  }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Stream getStream(Device d) const override {
    const auto device = with_index(d);
    return Stream(Stream::UNSAFE, device, current_stream[place(device.index())]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, with_index(d)); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::UNSAFE, with_index(d), ++last_stream); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    check_device(s.device_index());
    auto& stream = current_stream[place(s.device_index())];
    return Stream(Stream::UNSAFE, s.device(), std::exchange(stream, s.id()));
  }
  void* getStreamNativeHandle(const Stream s) const override {
    return reinterpret_cast<void*>(s.id());  // NOLINT(performance-no-int-to-ptr)
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = std::make_unique<Event>().release();
    static_cast<Event*>(*event)->recorded = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    std::unique_ptr<Event>(static_cast<Event*>(event)).reset();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    TORCH_CHECK_VALUE(from && to, "elapsed_time: both events must be recorded first.");
    const auto took = static_cast<Event*>(to)->recorded - static_cast<Event*>(from)->recorded;
    return std::chrono::duration<double, std::milli>(took).count();
  }
};

}  // namespace

DeviceIndex device_count() noexcept { return devices.load(std::memory_order_relaxed); }
void set_device_count(DeviceIndex count) { devices = count; }
DeviceIndex current_device() noexcept { return current; }

void check_device(DeviceIndex index) {
  constexpr int kInvalidDevice = 101;  // the code of CUDA's runtime
  if (index >= 0 && index < device_count()) return;
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kInvalidDevice,
                              c10::str("CUDA error: invalid device ordinal: got cuda:", static_cast<int>(index),
                                       ", but ", static_cast<int>(device_count()),
                                       device_count() == 1 ? " device is simulated." : " devices are simulated."));
}

DeviceIndex exchange_device(DeviceIndex index) {
  check_device(index);
  return std::exchange(current, index);
}

void register_guard() {
  static const Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}

}  // namespace weft::device
