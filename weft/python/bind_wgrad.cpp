#include <torch/csrc/autograd/python_variable.h>

#include "weft/core/dispatch_keys.h"
#include "weft/core/errors.h"
#include "weft/ops/operation.h"
#include "weft/ops/wgrad_attrs.h"
#include "weft/ops/wgrad_handle.h"
#include "weft/ops/wgrad_sink.h"
#include "weft/python/bridge.h"
#include "weft/python/convert.h"
#include "weft/python/module.h"

namespace weft::python {
namespace {

bool is_true(const py::object& object, const char* name) {
  return py::bool_(py::getattr(object, name, py::bool_(false)));
}

/// Reads and sets WgradAttrs as attributes of Python Parameters; caches nothing.
class PyAttrsResolver final : public ops::WgradResolver {
 public:
  ops::ResolvedWgradAttrs resolve(const at::Tensor& tensor, bool fetch) const override {
    const py::gil_scoped_acquire gil;
    const UserCodeGuard user_code;
    const auto param = to_python(tensor);
    // As in Transformer Engine: `get_main_grad` is called only for Parameters that Megatron-FSDP marks.
    const auto getter = py::getattr(param, "get_main_grad", py::none());
    const bool has_getter = py::hasattr(param, "__fsdp_param__") && PyCallable_Check(getter.ptr());
    if (has_getter && fetch) param.attr("main_grad") = getter();
    const auto main_grad = py::getattr(param, "main_grad", py::none());
    TORCH_CHECK_TYPE(main_grad.is_none() || THPVariable_Check(main_grad.ptr()), "weft: main_grad is a ",
                     Py_TYPE(main_grad.ptr())->tp_name, "; expected a tensor.");
    return {.main_grad = main_grad.is_none() ? at::Tensor() : THPVariable_Unpack(main_grad.ptr()),
            .has_getter = has_getter,
            .has_flag = py::hasattr(param, "grad_added_to_main_grad"),
            .overwrite = is_true(param, "overwrite_main_grad"),
            .zero_out = is_true(param, "zero_out_wgrad")};
  }

  void mark_grad_added(const at::Tensor& tensor) const override {
    const py::gil_scoped_acquire gil;
    to_python(tensor).attr("grad_added_to_main_grad") = true;
  }
};

bool backward_dw(const ops::BasicOp& op, const std::vector<at::Tensor>& params) {
  const py::gil_scoped_release release;
  const BelowAutograd below;
  return with_label(std::string(op.name()), [&] { return op.backward_dw(params); });
}

}  // namespace

void bind_wgrad(py::module_& m) {
  static const PyAttrsResolver resolver;
  ops::set_wgrad_resolver(&resolver);
  m.def("backward_dw", &backward_dw, py::arg("op"), py::arg("params"),
        "Computes the oldest delayed weight gradients of an operation; False if none are pending.");
  m.def("main_grad_handle", &ops::main_grad_handle, py::arg("weight"),
        "The handle by which the backward of a compiled program finds a weight, a tensor with one element.");
  m.def("pending_dw", &ops::pending_dw, py::arg("weight"), py::call_guard<py::gil_scoped_release>(),
        "The number of pending backward_dw() calls of a weight.");
}

}  // namespace weft::python
