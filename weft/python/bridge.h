#pragma once
#include <ATen/core/grad_mode.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "weft/core/dispatch_keys.h"
#include "weft/ops/context.h"

namespace weft::python {

/// The current call on this thread, for rules and operations written in Python: the Python objects of the pipeline's
/// operations, and the keyword arguments of each (nullptr: none).
struct __attribute__((visibility("hidden"))) PythonCall {
  const std::vector<py::object>* ops = nullptr;
  PyObject* keywords = nullptr;  // list of dicts
};
PythonCall& current_call();

/// Sets the current call for its scope.
class __attribute__((visibility("hidden"))) PythonCallGuard {
 public:
  explicit PythonCallGuard(PythonCall next) : before_(current_call()) { current_call() = next; }
  ~PythonCallGuard() { current_call() = before_; }
  PythonCallGuard(const PythonCallGuard&) = delete;
  PythonCallGuard& operator=(const PythonCallGuard&) = delete;

 private:
  PythonCall before_;
};

/// Runs user code with torch's normal dispatch, including modes, but without grad mode: the pipeline differentiates.
struct __attribute__((visibility("hidden"))) UserCodeGuard {
  c10::impl::ForceDispatchKeyGuard keys{c10::impl::tls_local_dispatch_key_set().included_,
                                        c10::impl::tls_local_dispatch_key_set().excluded_ -
                                            c10::autograd_dispatch_keyset_with_ADInplaceOrView - kPythonKeys};
  at::NoGradGuard no_grad;
};

/// One basic operation of a call into Python: the called operation, or one of those that a fused operation replaces.
struct ComponentOp {
  ops::OpContext ctx;
  bool keeps_state;  // keeps its Python context for backward; otherwise fills the slots of a C++ operation
  int extra_outputs;
  int slots;
  int weight_slot = -1;                              // BasicOp::weight_slot
  at::ScalarType dtype = at::ScalarType::Undefined;  // compute dtype, if known
};

/// Owns a Python object from C++: destroys it under the GIL, on any thread; leaks it after interpreter finalization.
template <class Object>
std::shared_ptr<Object> hold(Object object) {
  return {new Object(std::move(object)), [](Object* held) {
            if (!Py_IsInitialized()) return;
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

/// Sets the Python functions that implement Transformer Engine's calling convention: create a context, run forward, run
/// backward.
void set_bridge(py::object context, py::object forward, py::object backward);

/// Runs a pass of `op`, which implements or replaces `components`. Both require the GIL.
at::Tensor call_forward(const py::object& op, const py::list& basic_ops, std::vector<ComponentOp> components,
                        const at::Tensor& x);
at::Tensor call_backward(const py::object& op, std::vector<ComponentOp> components, const at::Tensor& dy);
/// The Python object that ran forward of an operation and kept its context for this backward.
py::object saved_op(ops::OpContext& ctx);

}  // namespace weft::python
