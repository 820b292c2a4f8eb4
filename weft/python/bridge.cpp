#include "weft/python/bridge.h"

#include <torch/csrc/autograd/python_variable.h>

namespace weft::python {

Scope& scope() {
  thread_local Scope current;
  return current;
}

namespace {

/// Python's own context and operation, kept for backward. Dies under the GIL.
struct State {
  py::object op, ctx;
  size_t begin = 0, count = 0;  // what it saved, in the frame's open list

  ~State() {
    if (!Py_IsInitialized()) {
      op.release();
      ctx.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    op = {};
    ctx = {};
  }
};

struct Bridge {
  py::object context, forward, backward;
};
Bridge& bridge() {
  static auto* instance = new Bridge;  // never destroyed: the interpreter may be gone by then
  return *instance;
}

py::object wrap(const at::Tensor& t) {
  return t.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(t)) : py::none();
}

at::Tensor unwrap(py::handle object) {
  if (object.is_none()) return {};
  TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), "an operation written in Python returned ",
                   Py_TYPE(object.ptr())->tp_name, " where a tensor or None was expected.");
  return THPVariable_Unpack(object.ptr());
}

size_t extra_inputs_of(const ops::OpPlan& plan) { return plan.extra_wanted.size(); }

py::object keywords_of(int index) {
  if (!scope().keywords) return py::dict();
  return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(scope().keywords, index));
}

void stash(Part& part, const py::object& op, const py::object& context) {
  auto& frame = part.ctx.frame();
  const auto to_save = py::tuple(context.attr("_take_saved")());
  if (!part.ctx.records()) return;
  if (!part.keeps_state) {
    TORCH_CHECK_VALUE(static_cast<int>(to_save.size()) <= part.slots, "a fused operation saved ", to_save.size(),
                      " tensors for an operation that has ", part.slots, " slots.");
    for (size_t k = 0; k < to_save.size(); ++k) part.ctx.save(static_cast<int>(k), unwrap(to_save[k]));
    return;
  }
  auto state = std::make_shared<State>();
  state->op = op;
  state->ctx = context;
  state->begin = frame.more_saved->size();
  state->count = to_save.size();
  for (const auto tensor : to_save) frame.more_saved->push_back(unwrap(tensor));
  frame.states->at(part.ctx.index()) = std::move(state);
}

/// What an operation written in C++ saved in a slot; the weight itself where no cast was saved.
at::Tensor saved_slot(Part& part, int slot) {
  const auto& saved = part.ctx.saved(slot);
  const bool weight = slot == part.weight_slot && !saved.defined() && part.ctx.input_wanted();
  return weight ? part.ctx.frame().params[part.ctx.plan().param_base] : saved;
}

/// The attributes that Transformer Engine's own operations leave in their contexts for a backward fusion.
void describe(const py::object& context, const Part& part) {
  if (part.dtype != at::ScalarType::Undefined) context.attr("dtype") = py::cast(part.dtype);
  context.attr("input_requires_grad") = part.ctx.input_wanted();
  if (!part.ctx.plan().param_wanted.empty()) context.attr("weight_requires_grad") = part.ctx.param_wanted(0);
}

py::object restore(Part& part) {
  auto& frame = part.ctx.frame();
  py::list saved;
  py::object context;
  if (part.keeps_state) {
    const auto state = std::static_pointer_cast<State>(frame.states->at(part.ctx.index()));
    context = state->ctx;
    for (size_t k = 0; k < state->count; ++k) saved.append(wrap((*frame.more_saved)[state->begin + k]));
  } else {
    context = bridge().context(part.ctx.records(), part.ctx.training());
    describe(context, part);
    for (int k = 0; k < part.slots; ++k) saved.append(wrap(saved_slot(part, k)));
  }
  context.attr("saved_tensors") = py::tuple(saved);
  return context;
}

}  // namespace

void set_bridge(py::object context, py::object forward, py::object backward) {
  bridge() = {std::move(context), std::move(forward), std::move(backward)};
}

py::object kept_op(ops::OpContext& ctx) {
  return std::static_pointer_cast<State>(ctx.frame().states->at(ctx.index()))->op;
}

/// An extra input as user code sees it: `requires_grad` says whether its gradient is wanted, also where an operation of
/// the pipeline made it.
static at::Tensor differentiable(const at::Tensor& extra, bool wanted) {
  if (!wanted || !extra.defined() || extra.requires_grad() || !at::isFloatingType(extra.scalar_type())) return extra;
  return extra.detach().requires_grad_();
}

at::Tensor call_forward(const py::object& op, const py::list& basic_ops, std::vector<Part> parts, const at::Tensor& x) {
  const OrdinaryTorch ordinary;
  py::list contexts, extras, keywords;
  for (auto& part : parts) {
    contexts.append(bridge().context(part.ctx.records(), part.ctx.training()));
    py::list inputs;
    for (size_t k = 0; k < extra_inputs_of(part.ctx.plan()); ++k) {
      inputs.append(
          wrap(differentiable(part.ctx.extra_input(static_cast<int>(k)), part.ctx.plan().extra_wanted[k] != 0)));
    }
    extras.append(py::tuple(inputs));
    keywords.append(keywords_of(part.ctx.index()));
  }
  const py::tuple result = bridge().forward(op, contexts, wrap(x), extras, keywords);
  const py::list extra_outputs = result[1];
  for (size_t i = 0; i < parts.size(); ++i) {
    const py::sequence outputs = extra_outputs[i];
    for (int k = 0; k < parts[i].extra_outputs; ++k) parts[i].ctx.set_extra_output(k, unwrap(outputs[k]));
    stash(parts[i], basic_ops[i], contexts[i]);
  }
  TORCH_CHECK_TYPE(!result[0].is_none(), py::str(py::type::of(op).attr("__name__")).cast<std::string>(),
                   " returned None from its forward pass; expected a tensor.");
  return unwrap(result[0]);
}

at::Tensor call_backward(const py::object& op, std::vector<Part> parts, const at::Tensor& dy) {
  const OrdinaryTorch ordinary;
  py::list contexts, extra_grads, param_counts, extra_counts;
  for (auto& part : parts) {
    contexts.append(restore(part));
    py::list grads;
    for (int k = 0; k < part.extra_outputs; ++k) grads.append(wrap(part.ctx.take_extra_output_grad(k)));
    extra_grads.append(py::tuple(grads));
    param_counts.append(part.ctx.plan().param_wanted.size());
    extra_counts.append(extra_inputs_of(part.ctx.plan()));
  }
  const py::tuple result = bridge().backward(op, contexts, wrap(dy), extra_grads, param_counts, extra_counts);
  const py::list param_grads = result[1], input_grads = result[2];
  for (size_t i = 0; i < parts.size(); ++i) {
    const py::sequence params = param_grads[i], inputs = input_grads[i];
    const auto& plan = parts[i].ctx.plan();
    for (size_t k = 0; k < params.size(); ++k)
      if (parts[i].ctx.param_wanted(static_cast<int>(k)))
        parts[i].ctx.set_param_grad(static_cast<int>(k), unwrap(params[k]));
    for (size_t k = 0; k < inputs.size(); ++k)
      if (plan.extra_wanted[k]) parts[i].ctx.set_extra_input_grad(static_cast<int>(k), unwrap(inputs[k]));
  }
  return unwrap(result[0]);
}

}  // namespace weft::python
