#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>

// A tensor on a simulated device and its host alias: the same bytes as a tensor of the CPU, which keeps them alive.

namespace weft::device {

inline bool is_simulated(const at::Tensor& t) { return t.defined() && t.device().type() == c10::DeviceType::CUDA; }

/// The host alias of a tensor on a device; other tensors as they are.
at::Tensor host_alias(const at::Tensor& t);

/// A tensor on `device` with the memory of `host`, a tensor of the CPU that is used nowhere else.
at::Tensor to_device(at::Tensor host, c10::Device device);

/// The host aliases of the arguments of one call. Afterwards `result` finds the tensor that an output of the call
/// belongs to, and `finish` gives the arguments the sizes and the memory that the call gave their aliases.
class HostCall {
 public:
  /// The device of outputs that are new: that of the first argument on a device, or the current one.
  c10::Device device() const;
  void set_device(c10::Device device) { device_ = device; }

  /// Whether no argument is on a device, as in a call that only its generator brings here.
  bool on_host() const { return arguments_.empty() && !device_; }

  at::Tensor alias(const at::Tensor& t);
  void finish();
  at::Tensor result(at::Tensor host);

 private:
  struct Argument {
    at::Tensor tensor, host;
    const void* data;
  };
  c10::SmallVector<Argument, 4> arguments_;
  std::optional<c10::Device> device_;
};

}  // namespace weft::device
