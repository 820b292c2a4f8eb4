#include "weft/device/host_kernel.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <memory>
#include <string>

#include "weft/device/devices.h"
#include "weft/device/generator.h"
#include "weft/device/host_alias.h"

namespace weft::device {
namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

struct Row {
  const char* name;    // with the overload
  Mixing mixing;       //
  const char* method;  // the name of the wrapper of CUDA's kernel, for torch's error
  bool has_kernel;     // for the CPU
};

constexpr Row kOperations[] = {
#include "device_operations.inc"
};

/// Calls visit(tensor) on each defined tensor in `value`, also in lists.
template <class F>
void for_tensors(const IValue& value, const F& visit) {
  if (value.isTensor()) {
    if (const auto& t = value.toTensor(); t.defined()) visit(t);
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) for_tensors(element, visit);
  }
}

/// `value` with change(tensor) in place of each tensor.
template <class F>
void change_tensors(IValue& value, const F& change) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = IValue(change(std::move(value).toTensor()));
  } else if (value.isTensorList()) {
    auto list = value.toTensorList();
    c10::List<at::Tensor> changed;
    changed.reserve(list.size());
    for (const at::Tensor& t : list) changed.push_back(t.defined() ? change(t) : t);
    value = IValue(std::move(changed));
  } else if (value.isList()) {
    const auto list = value.toList();
    auto changed = c10::impl::GenericList(list.elementType());
    changed.reserve(list.size());
    for (const IValue& element : list) {
      IValue copy = element;
      change_tensors(copy, change);
      changed.push_back(copy);
    }
    value = IValue(changed);
  }
}

[[noreturn]] void raise_two_devices(c10::Device one, c10::Device other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
              other, "!");
  __builtin_unreachable();
}

/// One operation: its checks, and how its arguments reach the CPU's kernel.
class HostKernel final : public c10::OperatorKernel {
 public:
  HostKernel(const Row& row, const OperatorHandle& op) : method_(row.method), mixing_(row.mixing) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& argument = arguments[i];
      const auto type = argument.type()->str();
      if (type == "Generator?" || type == "Generator") generator_ = static_cast<int>(i);
      if (type == "Device?" || type == "Device") device_ = static_cast<int>(i);
      if (type.find("Tensor") == std::string::npos) continue;
      const bool out = argument.is_out();
      const bool written = argument.alias_info() && argument.alias_info()->isWrite();
      tensors_.push_back({i, argument.name(), out || !argument.kwarg_only(), out, written});
    }
    std::stable_partition(tensors_.begin(), tensors_.end(),
                          [](const auto& t) { return t.out; });  // torch checks them first
    count_ = arguments.size();
    returns_ = op.schema().returns().size();
  }

  void operator()(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const auto first = stack->size() - count_;
    const auto at = [&](size_t i) -> IValue& { return (*stack)[first + i]; };
    constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);
    if (mixing_ == Mixing::parts && has_host_tensor(at)) return op.redispatchBoxed(kCpu, stack);
    check(at);
    HostCall call;
    for (const auto& tensor : tensors_)
      change_tensors(at(tensor.index), [&](const at::Tensor& t) { return call.alias(t); });
    if (device_ >= 0) {
      auto& device = at(static_cast<size_t>(device_));
      if (device.isDevice() && device.toDevice().is_cuda()) {
        call.set_device(with_index(device.toDevice()));
        device = IValue(c10::Device(c10::kCPU));
      }
    }
    if (generator_ >= 0) use_host_generator(at(static_cast<size_t>(generator_)), call);
    op.redispatchBoxed(kCpu, stack);
    call.finish();
    for (size_t i = stack->size() - returns_; i < stack->size(); ++i)
      change_tensors((*stack)[i], [&](at::Tensor t) { return call.result(std::move(t)); });
  }

 private:
  struct TensorArgument {
    size_t index;
    std::string name;
    bool checked, out, written;
  };

  template <class At>
  bool has_host_tensor(const At& at) const {
    bool found = false;
    for (const auto& tensor : tensors_)
      for_tensors(at(tensor.index), [&](const at::Tensor& t) { found |= t.is_cpu(); });
    return found;
  }

  template <class At>
  void check(const At& at) const {
    if (tensors_.size() < 2 && !(tensors_.size() == 1 && at(tensors_[0].index).isList())) return;
    if (mixing_ == Mixing::same || mixing_ == Mixing::parts) {
      std::optional<c10::Device> common;
      for (const auto& tensor : tensors_) {
        if (!tensor.checked) continue;
        for_tensors(at(tensor.index), [&](const at::Tensor& t) {
          c10::impl::check_and_update_common_device(common, t, method_, tensor.name.c_str());
        });
      }
    } else if (mixing_ == Mixing::iterator || mixing_ == Mixing::scalars) {
      check_iterator(at);
    } else if (mixing_ == Mixing::mask) {
      check_mask(at);
    } else if (mixing_ == Mixing::weights) {
      check_weights(at);
    } else if (mixing_ == Mixing::indices) {
      check_indices(at);
    }
  }

  /// TensorIterator: an input without dimensions may be on the CPU; the common device is the first that is not the CPU.
  template <class At>
  void check_iterator(const At& at) const {
    std::optional<c10::Device> common;
    for (const auto& tensor : tensors_)
      for_tensors(at(tensor.index), [&](const at::Tensor& t) {
        if (!common && !t.is_cpu()) common = t.device();
      });
    int scalars = 0;
    for (const auto& tensor : tensors_)
      for_tensors(at(tensor.index), [&](const at::Tensor& t) {
        if (t.is_cpu() && t.dim() == 0 && !tensor.written) {
          TORCH_CHECK(++scalars == 1 || mixing_ == Mixing::scalars,
                      "Trying to pass too many CPU scalars to non-CPU kernel!");
        } else if (t.device() != *common) {
          raise_two_devices(*common, t.device());
        }
      });
  }

  /// `convolution(input, weight, bias, …)`, and its backward with the gradient of the output before these.
  template <class At>
  void check_weights(const At& at) const {
    const auto& input = at(0).toTensor();
    for (const auto& tensor : tensors_)
      for_tensors(at(tensor.index), [&](const at::Tensor& t) {
        TORCH_CHECK(t.device() == input.device(), "Input type (", input.toString(), ") and ", tensor.name, " type (",
                    t.toString(), ") should be the same");
      });
  }

  /// `masked_fill_(self, mask, value)`.
  template <class At>
  void check_mask(const At& at) const {
    const auto self = at(0).toTensor().device(), mask = at(1).toTensor().device();
    TORCH_CHECK(self == mask, "expected self and mask to be on the same device, but got mask on ", mask,
                " and self on ", self);
  }

  /// `index` and its kin: self decides the device.
  template <class At>
  void check_indices(const At& at) const {
    const auto self = at(0).toTensor().device();
    for (const auto& tensor : tensors_) {
      const bool indices = tensor.name == "indices";
      for_tensors(at(tensor.index), [&](const at::Tensor& t) {
        if (t.device() == self || (t.is_cpu() && (indices || (t.dim() == 0 && !tensor.written)))) return;
        if (!indices) raise_two_devices(self, t.device());
        TORCH_CHECK(false, "indices should be either on cpu or on the same device as the indexed tensor (", self, ")");
      });
    }
  }

  static void use_host_generator(IValue& generator, const HostCall& call) {
    if (generator.isNone()) {
      generator = IValue(host_generator(default_generator(call.device().index())));
      return;
    }
    const auto& given = generator.toGenerator();
    TORCH_CHECK(!call.on_host(), "Expected a 'cpu' device type for generator but found 'cuda'");
    TORCH_CHECK(given.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                c10::DeviceTypeName(given.device().type(), /*lower_case=*/true), "'");
    generator = IValue(host_generator(given));
  }

  std::vector<TensorArgument> tensors_;
  const char* method_;
  Mixing mixing_;
  size_t count_, returns_;
  int generator_ = -1, device_ = -1;  // indices of arguments
};

/// An operation that torch computes with CUDA's libraries only.
struct NoHostKernel final : c10::OperatorKernel {
  void operator()(const OperatorHandle& op, c10::DispatchKeySet, Stack*) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "simulated device: ", op.schema().operator_name(),
        " has a kernel for CUDA only, and torch has none for the CPU that could stand in. Run the "
        "part of the program that calls it on the CPU.");
  }
};

}  // namespace

void register_host_kernels(OperationTable& table) {
  for (const auto& row : kOperations) {
    const std::string name = row.name;
    const auto dot = name.find('.');
    const auto op = c10::Dispatcher::singleton().findSchema(
        {"aten::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    if (!op) continue;  // declared for another backend's build
    table.add(row.name, row.has_kernel
                            ? torch::CppFunction::makeFromBoxedFunctor(std::make_unique<HostKernel>(row, *op))
                            : torch::CppFunction::makeFromBoxedFunctor(std::make_unique<NoHostKernel>()));
  }
}

}  // namespace weft::device
