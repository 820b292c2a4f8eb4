#include "weft/ops/wgrad_handle.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>

#include <mutex>
#include <random>
#include <unordered_map>

#include "weft/core/weak_tensor_map.h"

namespace weft::ops {
namespace {

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Parameters by the value of their handle. Values are random, so that an altered one is not another Parameter's.
class ParametersByHandle {
 public:
  double insert(const at::Tensor& param) {
    const std::lock_guard lock(mutex_);
    std::erase_if(params_, [](const auto& entry) { return entry.second.expired(); });
    for (;;) {
      const auto value = static_cast<double>(random_() >> 11);  // 53 bits: exact
      if (params_.try_emplace(value, Weak(param.getIntrusivePtr())).second) return value;
    }
  }

  at::Tensor find(double value) const {
    const std::lock_guard lock(mutex_);
    const auto found = params_.find(value);
    return found == params_.end() ? at::Tensor() : at::Tensor(found->second.lock());
  }

 private:
  mutable std::mutex mutex_;
  std::mt19937_64 random_{std::random_device{}()};
  std::unordered_map<double, Weak> params_;
};

ParametersByHandle& parameters_by_handle() {
  static auto* table = new ParametersByHandle;  // never destroyed: parameters may outlive static destructors
  return *table;
}

struct Handle {
  std::once_flag created;
  at::Tensor tensor;
};

WeakTensorMap<Handle>& handles() {
  static auto* table = new WeakTensorMap<Handle>;
  return *table;
}

}  // namespace

at::Tensor main_grad_handle(const at::Tensor& param) {
  const auto handle = handles().get(param);
  std::call_once(handle->created, [&] {
    const c10::InferenceMode off(false);
    // Not through the dispatcher: a tracer may be active.
    at::Tensor tensor = at::detail::empty_cpu({1}, at::TensorOptions(at::kDouble));
    *tensor.mutable_data_ptr<double>() = parameters_by_handle().insert(param);
    handle->tensor = tensor.set_requires_grad(true);
  });
  return handle->tensor;
}

at::Tensor parameter_of(const at::Tensor& handle) {
  TORCH_CHECK_VALUE(handle.device().is_cpu() && handle.scalar_type() == at::kDouble && handle.numel() == 1,
                    "weft: a main_grad handle is ", handle.scalar_type(), " of shape ", handle.sizes(), " on ",
                    handle.device(),
                    ", expected float64 of shape [1] on cpu. Let saved-tensor hooks keep it as it is.");
  const auto param = parameters_by_handle().find(*handle.const_data_ptr<double>());
  TORCH_CHECK(param.defined(),
              "weft: a main_grad handle names no Parameter. Keep the Parameters of a compiled call until its backward, "
              "let saved-tensor hooks return the handle (float64, one element) as it is, and where the attributes of a "
              "Parameter were copied to another one, delete the copied _main_grad_handle.");
  return param;
}

}  // namespace weft::ops
