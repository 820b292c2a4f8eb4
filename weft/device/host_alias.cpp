#include "weft/device/host_alias.h"

#include <c10/core/TensorImpl.h>

#include <utility>

#include "weft/device/devices.h"
#include "weft/device/memory.h"

namespace weft::device {
namespace {

c10::DispatchKeySet host_keys(const at::Tensor& t) {
  constexpr c10::DispatchKeySet kPending(
      {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor});
  return c10::DispatchKeySet(c10::DispatchKey::CPU) | (t.key_set() & kPending);
}

void check_strided(const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == c10::kStrided, "simulated device: ", t.layout(),
                              " tensors are not supported. Use dense tensors, or keep these on the CPU.");
}

}  // namespace

at::Tensor host_alias(const at::Tensor& t) {
  if (!is_simulated(t)) return t;
  check_strided(t);
  auto* impl = t.unsafeGetTensorImpl();
  at::Tensor host = t.has_storage() && t.storage()
                        ? at::detail::make_tensor<c10::TensorImpl>(host_storage(t.storage()), host_keys(t), t.dtype())
                        : at::detail::make_tensor<c10::TensorImpl>(c10::Storage(), host_keys(t), t.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
  if (impl->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
  return host;
}

at::Tensor to_device(at::Tensor host, c10::Device device) {
  check_strided(host);
  device = with_index(device);
  auto* impl = host.unsafeGetTensorImpl();
  auto storage = impl->storage();
  TORCH_CHECK_NOT_IMPLEMENTED(storage, "simulated device: a kernel returned a tensor without memory.");
  impl->set_storage_keep_dtype(device_storage(std::move(storage), device));
  impl->_change_backend_component_keys(device);
  return host;
}

c10::Device HostCall::device() const { return device_ ? *device_ : cuda_device(current_device()); }

at::Tensor HostCall::alias(const at::Tensor& t) {
  if (!is_simulated(t)) return t;
  for (const auto& argument : arguments_)
    if (argument.tensor.is_same(t)) return argument.host;
  if (!device_) device_ = t.device();
  auto host = host_alias(t);
  const auto* data = t.has_storage() && t.storage() ? t.storage().data() : nullptr;
  arguments_.push_back({t, host, data});
  return host;
}

void HostCall::finish() {
  for (auto& [tensor, host, data] : arguments_) {
    auto* impl = tensor.unsafeGetTensorImpl();
    const auto* host_impl = host.unsafeGetTensorImpl();
    if (host.storage().data() != data && impl->storage().data() != host.storage().data())
      follow_host_storage(*impl->storage().unsafeGetStorageImpl(), host.storage());
    if (impl->sizes() != host_impl->sizes() || impl->strides() != host_impl->strides() ||
        impl->storage_offset() != host_impl->storage_offset())
      impl->set_sizes_and_strides(host_impl->sizes(), host_impl->strides(), host_impl->storage_offset());
  }
}

at::Tensor HostCall::result(at::Tensor host) {
  if (!host.defined() || !host.is_cpu()) return host;
  for (const auto& argument : arguments_)
    if (argument.host.is_same(host)) return argument.tensor;
  const auto* shared = host.storage().unsafeGetStorageImpl();
  for (const auto& argument : arguments_) {
    if (argument.host.storage().unsafeGetStorageImpl() != shared || !shared) continue;
    auto* impl = host.unsafeGetTensorImpl();
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(argument.tensor.storage()),
                                                         argument.tensor.key_set(), host.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
    if (host.is_conj() != view.is_conj()) view._set_conj(host.is_conj());
    if (host.is_neg() != view.is_neg()) view._set_neg(host.is_neg());
    return view;
  }
  return to_device(std::move(host), device());
}

}  // namespace weft::device
