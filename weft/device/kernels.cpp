#include "weft/device/kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

#include <optional>
#include <string>
#include <tuple>

#include "weft/device/devices.h"
#include "weft/device/generator.h"
#include "weft/device/host_alias.h"
#include "weft/device/memory.h"

namespace weft::device {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

constexpr c10::DispatchKeySet kCuda(c10::DispatchKey::CUDA);

/// Allocates on the device of its scope.
struct OnDevice {
  explicit OnDevice(std::optional<c10::Device> device)
      : previous(exchange_device(with_index(device.value_or(c10::Device(c10::kCUDA))).index())) {}
  ~OnDevice() { exchange_device(previous); }
  OnDevice(const OnDevice&) = delete;
  c10::DeviceIndex previous;
};

void check_factory(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(!layout || *layout == c10::kStrided, "Expected a strided layout, got ", *layout);
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool> pin_memory,
             std::optional<c10::MemoryFormat> memory_format) {
  check_factory(layout, pin_memory);
  const OnDevice on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator(), kCuda,
                                   c10::dtype_or_default(dtype), memory_format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                     std::optional<bool> pin_memory) {
  check_factory(layout, pin_memory);
  const OnDevice on(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_allocator(), kCuda, c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  auto to = host_alias(self);
  to.copy_(host_alias(from), non_blocking);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  host_alias(to).copy_(host_alias(self), non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  host_alias(to).copy_(host_alias(self));
  return to;
}

at::Scalar local_scalar(const Tensor& self) { return at::_local_scalar_dense(host_alias(self)); }

/// Grows the storage of `self` to hold its sizes, as resize_ does.
void fit_storage(const Tensor& self) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(),
                                                      static_cast<size_t>(self.storage_offset()));
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (impl->numel() > 0 && bytes > storage->nbytes()) resize_storage(*storage, bytes);
}

// NOLINTBEGIN(bugprone-return-const-ref-from-parameter, performance-unnecessary-value-param): torch's signatures
const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<c10::MemoryFormat> memory_format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (impl->sizes() == sizes && !memory_format) return self;
  impl->set_sizes_contiguous(sizes);
  if (memory_format) impl->empty_tensor_restride(*memory_format);
  fit_storage(self);
  return self;
}

/// The storage that set_() gives a tensor must be on its device.
void check_storage(const Tensor& self, const c10::Storage& storage) {
  TORCH_CHECK(storage.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", storage.device(),
              "\".  This is no longer allowed; the devices must match.");
}

Tensor& set_storage_at(Tensor& self, c10::Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  check_storage(self, storage);
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty() && !sizes.empty())
    impl->set_sizes_contiguous(sizes);
  else
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  fit_storage(self);
  return self;
}
// NOLINTEND(bugprone-return-const-ref-from-parameter, performance-unnecessary-value-param)

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_at(self, std::move(storage), 0, SymIntArrayRef{SymInt(count)}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& from) {
  return set_storage_at(self, from.storage(), from.storage_offset(), from.sym_sizes(), from.sym_strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_storage_at(self, allocate(0, self.device()), 0, SymIntArrayRef{SymInt(0)}, {});
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  std::optional<int64_t> at;
  if (offset) at = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}
Tensor view(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

/// The CPU's kernel draws from the CPU's default generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0) return {input, at::empty_like(input, input.options().dtype(at::kBool))};
  if (!train.value_or(true)) return {input, at::ones_like(input, input.options().dtype(at::kBool))};
  const auto kept = at::bernoulli(at::full_like(input, 1 - p)).to(at::kBool);
  return {input.mul(kept).mul_(p == 1 ? 0. : 1 / (1 - p)), kept};
}

/// Whether a softmax computes in float32 from lower precision, which kernels for the CPU do not.
Tensor softmax_input(const Tensor& self, bool half_to_float) { return half_to_float ? self.to(at::kFloat) : self; }
Tensor softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  return to_device(at::_softmax(host_alias(softmax_input(self, half_to_float)), dim, false), self.device());
}
Tensor log_softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  return to_device(at::_log_softmax(host_alias(softmax_input(self, half_to_float)), dim, false), self.device());
}
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  const auto dx = at::_softmax_backward_data(host_alias(grad), host_alias(output), dim, output.scalar_type());
  return to_device(dx.to(dtype), grad.device());
}
Tensor log_softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  const auto dx = at::_log_softmax_backward_data(host_alias(grad), host_alias(output), dim, output.scalar_type());
  return to_device(dx.to(dtype), grad.device());
}

bool no_library_ctc_loss(const Tensor&, const Tensor&, c10::IntArrayRef, c10::IntArrayRef, int64_t) { return false; }
bool no_library_ctc_loss_lengths(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; }
void record_stream(Tensor&, c10::Stream) {}

}  // namespace

void register_kernels(OperationTable& table) {
  table.add("empty.memory_format", empty);
  table.add("empty_strided", empty_strided);
  table.add("copy_", copy_);
  table.add("_copy_from", copy_from);
  table.add("_copy_from_and_resize", copy_from_and_resize);
  table.add("_local_scalar_dense", local_scalar);
  table.add("resize_", resize_);
  table.add("set_.source_Storage", set_storage);
  table.add("set_.source_Storage_storage_offset", set_storage_at);
  table.add("set_.source_Tensor", set_tensor);
  table.add("set_", set_nothing);
  table.add("as_strided", as_strided);
  table.add("view", view);
  table.add("_reshape_alias", reshape_alias);
  table.add("unfold", unfold);
  table.add("native_dropout", native_dropout);
  table.add("_softmax", softmax);
  table.add("_log_softmax", log_softmax);
  table.add("_softmax_backward_data", softmax_backward);
  table.add("_log_softmax_backward_data", log_softmax_backward);
  for (const char* library : {"_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}) {
    table.add(library, no_library_ctc_loss);
    table.add((std::string(library) + ".Tensor").c_str(), no_library_ctc_loss_lengths);
  }
  table.add("record_stream", record_stream);
}

}  // namespace weft::device
