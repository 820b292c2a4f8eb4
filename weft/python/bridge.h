#pragma once
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "weft/fuser/below_autograd.h"
#include "weft/ops/context.h"

namespace weft::python {

/// What rules and operations written in Python may ask about the call under way on this thread: the Python objects of
/// the pipeline's operations, and the keyword arguments of each (nullptr: none).
struct __attribute__((visibility("hidden"))) Scope {
  const std::vector<py::object>* ops = nullptr;
  PyObject* keywords = nullptr;  // list of dicts
};
Scope& scope();

/// Sets the scope for one call.
class __attribute__((visibility("hidden"))) ScopeGuard {
 public:
  explicit ScopeGuard(Scope next) : before_(scope()) { scope() = next; }
  ~ScopeGuard() { scope() = before_; }
  ScopeGuard(const ScopeGuard&) = delete;
  ScopeGuard& operator=(const ScopeGuard&) = delete;

 private:
  Scope before_;
};

/// User code runs with torch's ordinary dispatch, modes included, but records no graph: the pipeline differentiates.
struct __attribute__((visibility("hidden"))) OrdinaryTorch {
  c10::impl::ForceDispatchKeyGuard keys{c10::impl::tls_local_dispatch_key_set().included_,
                                        c10::impl::tls_local_dispatch_key_set().excluded_ -
                                            c10::autograd_dispatch_keyset_with_ADInplaceOrView - fuser::kPythonModes};
  at::NoGradGuard no_grad;
};

/// One part of a call into Python: a basic operation, or one of those that a fused operation stands for.
struct Part {
  ops::OpContext ctx;
  bool keeps_state;  // its own context survives; otherwise it fills the slots of an operation written in C++
  int extra_outputs;
  int slots;
  int weight_slot = -1;                              // BasicOp::weight_slot
  at::ScalarType dtype = at::ScalarType::Undefined;  // it computes in, if known
};

/// A Python object held from C++: destroyed under the GIL, on whichever thread; leaked once the interpreter is gone.
template <class Object>
std::shared_ptr<Object> hold(Object object) {
  return {new Object(std::move(object)), [](Object* held) {
            if (!Py_IsInitialized()) return;
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

/// Functions of weft.ops that speak the reference's calling convention: make a context, run forward, run backward.
void set_bridge(py::object context, py::object forward, py::object backward);

/// Runs a pass of `op`, which stands for `parts`. Both need the GIL.
at::Tensor call_forward(const py::object& op, const py::list& basic_ops, std::vector<Part> parts, const at::Tensor& x);
at::Tensor call_backward(const py::object& op, std::vector<Part> parts, const at::Tensor& dy);
/// The Python object that ran the forward pass of an operation and left its context for this backward.
py::object kept_op(ops::OpContext& ctx);

}  // namespace weft::python
