#include "weft/python/bridge.h"

#include <torch/csrc/autograd/python_variable.h>

#include "weft/python/convert.h"

namespace weft::python {

PythonCall& current_call() {
  thread_local PythonCall current;
  return current;
}

namespace {

/// An operation written in Python and its OperationContext, kept for backward.
struct PythonState {
  py::object op, ctx;
  size_t begin = 0, count = 0;  // range of the tensors that it saved, in Frame::dynamic_saved
};

/// The functions passed to `set_bridge`.
struct Bridge {
  py::object context, forward, backward;
};
Bridge& bridge() {
  static auto* instance = new Bridge;  // never destroyed: the interpreter may be finalized first
  return *instance;
}

at::Tensor unwrap(py::handle object) {
  if (object.is_none()) return {};
  TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), "weft: an operation written in Python returned ",
                   Py_TYPE(object.ptr())->tp_name, ", expected a tensor or None.");
  return THPVariable_Unpack(object.ptr());
}

size_t extra_inputs_of(const ops::OpPlan& plan) { return plan.needs_extra_grad.size(); }

/// The keyword arguments of an operation in the current call.
py::object keywords_of(int index) {
  if (!current_call().keywords) return py::dict();
  return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(current_call().keywords, index));
}

/// After forward: keeps `context` and the tensors saved in it for backward. For an operation computed in C++, which may
/// run its own backward, the tensors go to its slots.
void save_state(ComponentOp& component, const py::object& op, const py::object& context) {
  const auto to_save = py::tuple(context.attr("_take_saved")());
  if (!component.ctx.needs_grad()) return;
  if (!component.keeps_state) {
    TORCH_CHECK_VALUE(static_cast<int>(to_save.size()) <= component.slots, "weft: a fused operation saved ",
                      to_save.size(), " tensors for operation ", component.ctx.index(), " (",
                      py::str(py::type::of(op).attr("__name__")).cast<std::string>(), "), expected at most ",
                      component.slots, ".");
    for (size_t k = 0; k < to_save.size(); ++k) component.ctx.save(static_cast<int>(k), unwrap(to_save[k]));
    return;
  }
  auto& dynamic_saved = component.ctx.dynamic_saved();
  component.ctx.python_state() = hold(PythonState{op, context, dynamic_saved.size(), to_save.size()});
  for (const auto tensor : to_save) dynamic_saved.push_back(unwrap(tensor));
}

/// What a C++ operation saved in a slot; for the weight slot, the weight itself if no cast was saved.
at::Tensor saved_slot(ComponentOp& component, int slot) {
  const auto& saved = component.ctx.saved(slot);
  const bool weight = slot == component.weight_slot && !saved.defined() && component.ctx.needs_input_grad();
  return weight ? component.ctx.param(0) : saved;
}

/// Sets the context attributes that Transformer Engine's operations provide to a backward fusion.
void set_te_attributes(const py::object& context, const ComponentOp& component) {
  if (component.dtype != at::ScalarType::Undefined) context.attr("dtype") = py::cast(component.dtype);
  context.attr("input_requires_grad") = component.ctx.needs_input_grad();
  if (!component.ctx.plan().needs_param_grad.empty())
    context.attr("weight_requires_grad") = component.ctx.needs_param_grad(0);
}

/// The context for backward: the one that forward kept, or a new one with what a C++ operation saved in its slots.
py::object restore_context(ComponentOp& component) {
  py::list saved;
  py::object context;
  if (component.keeps_state) {
    const auto state = std::static_pointer_cast<PythonState>(component.ctx.python_state());
    context = state->ctx;
    for (size_t k = 0; k < state->count; ++k) saved.append(to_python(component.ctx.dynamic_saved()[state->begin + k]));
  } else {
    context = bridge().context(component.ctx.needs_grad(), component.ctx.training());
    set_te_attributes(context, component);
    for (int k = 0; k < component.slots; ++k) saved.append(to_python(saved_slot(component, k)));
  }
  context.attr("saved_tensors") = py::tuple(saved);
  return context;
}

}  // namespace

void set_bridge(py::object context, py::object forward, py::object backward) {
  bridge() = {std::move(context), std::move(forward), std::move(backward)};
}

py::object saved_op(ops::OpContext& ctx) { return std::static_pointer_cast<PythonState>(ctx.python_state())->op; }

/// An extra input for user code: its `requires_grad` tells whether its gradient is needed, even if another operation of
/// the pipeline produced it.
static at::Tensor differentiable(const at::Tensor& extra, bool needs_grad) {
  if (!needs_grad || !extra.defined() || extra.requires_grad() || !at::isFloatingType(extra.scalar_type()))
    return extra;
  return extra.detach().requires_grad_();
}

at::Tensor call_forward(const py::object& op, const py::list& basic_ops, std::vector<ComponentOp> components,
                        const at::Tensor& x) {
  const UserCodeGuard user_code;
  py::list contexts, extras, keywords;
  for (auto& component : components) {
    contexts.append(bridge().context(component.ctx.needs_grad(), component.ctx.training()));
    py::list inputs;
    for (size_t k = 0; k < extra_inputs_of(component.ctx.plan()); ++k) {
      inputs.append(to_python(differentiable(component.ctx.extra_input(static_cast<int>(k)),
                                             component.ctx.plan().needs_extra_grad[k] != 0)));
    }
    extras.append(py::tuple(inputs));
    keywords.append(keywords_of(component.ctx.index()));
  }
  const py::tuple result = bridge().forward(op, contexts, to_python(x), extras, keywords);
  const py::list extra_outputs = result[1];
  for (size_t i = 0; i < components.size(); ++i) {
    const py::sequence outputs = extra_outputs[i];
    for (int k = 0; k < components[i].extra_outputs; ++k) components[i].ctx.set_extra_output(k, unwrap(outputs[k]));
    save_state(components[i], basic_ops[i], contexts[i]);
  }
  TORCH_CHECK_TYPE(!result[0].is_none(), py::str(py::type::of(op).attr("__name__")).cast<std::string>(),
                   ": forward returned None, expected a tensor.");
  return unwrap(result[0]);
}

at::Tensor call_backward(const py::object& op, std::vector<ComponentOp> components, const at::Tensor& dy) {
  const UserCodeGuard user_code;
  py::list contexts, extra_grads, param_counts, extra_counts;
  for (auto& component : components) {
    contexts.append(restore_context(component));
    py::list grads;
    for (int k = 0; k < component.extra_outputs; ++k) grads.append(to_python(component.ctx.take_extra_output_grad(k)));
    extra_grads.append(py::tuple(grads));
    param_counts.append(component.ctx.plan().needs_param_grad.size());
    extra_counts.append(extra_inputs_of(component.ctx.plan()));
  }
  const py::tuple result = bridge().backward(op, contexts, to_python(dy), extra_grads, param_counts, extra_counts);
  const py::list param_grads = result[1], input_grads = result[2];
  for (size_t i = 0; i < components.size(); ++i) {
    const py::sequence params = param_grads[i], inputs = input_grads[i];
    const auto& plan = components[i].ctx.plan();
    for (size_t k = 0; k < params.size(); ++k)
      if (components[i].ctx.needs_param_grad(static_cast<int>(k)))
        components[i].ctx.set_param_grad(static_cast<int>(k), unwrap(params[k]));
    for (size_t k = 0; k < inputs.size(); ++k)
      if (plan.needs_extra_grad[k]) components[i].ctx.set_extra_input_grad(static_cast<int>(k), unwrap(inputs[k]));
  }
  return unwrap(result[0]);
}

}  // namespace weft::python
