#include "weft/python/custom.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include "weft/fused/rules.h"
#include "weft/python/module.h"

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

/// User code runs with torch's ordinary dispatch, but records no graph: the pipeline differentiates.
struct OrdinaryTorch {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::impl::tls_local_dispatch_key_set().included_,
      c10::impl::tls_local_dispatch_key_set().excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  at::NoGradGuard no_grad;
};

/// Functions of weft.ops that speak the reference's calling convention.
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

/// One part of a call into Python: a basic operation, or one of those that a fused operation stands for.
struct Part {
  ops::OpContext ctx;
  bool keeps_state;  // its own context survives; otherwise it fills the slots of an operation written in C++
  int extra_outputs;
  int slots;
};

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

at::Tensor call_forward(const py::object& op, const py::list& basic_ops, std::vector<Part> parts, const at::Tensor& x) {
  const OrdinaryTorch ordinary;
  py::list contexts, extras, keywords;
  for (auto& part : parts) {
    contexts.append(bridge().context(part.ctx.records(), part.ctx.training()));
    py::list inputs;
    for (size_t k = 0; k < extra_inputs_of(part.ctx.plan()); ++k) {
      auto extra = part.ctx.extra_input(static_cast<int>(k));
      inputs.append(wrap(extra));
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
    for (int k = 0; k < part.slots; ++k) saved.append(wrap(part.ctx.saved(k)));
  }
  context.attr("saved_tensors") = py::tuple(saved);
  return context;
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

}  // namespace

PyOp::PyOp(const py::object& module, std::vector<ops::ParamSpec> params, int extra_inputs, int extra_outputs)
    : module_(new py::weakref(module),
              [](py::weakref* ref) {
                const py::gil_scoped_acquire gil;
                delete ref;
              }),
      name_(py::type::of(module).attr("__name__").cast<std::string>()),
      params_(std::move(params)),
      extra_inputs_(extra_inputs),
      extra_outputs_(extra_outputs) {}

ops::Inferred PyOp::infer(const ops::OpPlan&, const ops::Spec&, c10::ArrayRef<ops::Spec>,
                          c10::ArrayRef<ops::Spec>) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, name_, " is written in Python and cannot tell its sizes before it ran.");
}

at::Tensor PyOp::forward(ops::OpContext& ctx, const at::Tensor& x, ops::Params) const {
  const py::gil_scoped_acquire gil;
  const py::object module = (*module_)();
  return call_forward(module, py::list(py::make_tuple(module)), {{ctx, true, extra_outputs_, 0}}, x);
}

at::Tensor PyOp::backward(ops::OpContext& ctx, const at::Tensor& dy, ops::Params) const {
  const py::gil_scoped_acquire gil;
  const auto state = std::static_pointer_cast<State>(ctx.frame().states->at(ctx.index()));
  return call_backward(state->op, {{ctx, true, extra_outputs_, 0}}, dy);
}

namespace {

/// A fused operation written in Python.
class PyFused final : public fused::FusedOp {
 public:
  struct Shape {
    bool keeps_state;
    int extra_outputs, slots;
  };
  PyFused(py::object op, std::vector<Shape> shapes)
      : op_(new py::object(std::move(op)),
            [](py::object* o) {
              const py::gil_scoped_acquire gil;
              delete o;
            }),
        shapes_(std::move(shapes)) {}

  at::Tensor forward(fused::StepContext& ctx, const at::Tensor& x) const override {
    const py::gil_scoped_acquire gil;
    return call_forward(*op_, py::list(op_->attr("basic_ops")), parts(ctx), x);
  }
  at::Tensor backward(fused::StepContext& ctx, const at::Tensor& dy) const override {
    const py::gil_scoped_acquire gil;
    return call_backward(*op_, parts(ctx), dy);
  }
  bool routes_inner_channels() const override { return true; }
  bool process_local() const override { return true; }

 private:
  std::vector<Part> parts(fused::StepContext& ctx) const {
    std::vector<Part> list;
    for (size_t i = 0; i < shapes_.size(); ++i)
      list.push_back({ctx.op(static_cast<int>(i)), shapes_[i].keeps_state, shapes_[i].extra_outputs, shapes_[i].slots});
    return list;
  }
  std::shared_ptr<py::object> op_;
  std::vector<Shape> shapes_;
};

/// Steps as Python sees them: a basic operation's module, or the fused operation a function made earlier.
struct Rewriter {
  std::string name;
  py::object function;
  fused::Pass pass;

  std::vector<fused::Step> operator()(const std::vector<fused::Step>& steps, const fused::PlanView&) const {
    const auto* modules = scope().ops;
    if (!modules) return steps;  // a pipeline made in C++ has no Python objects to show
    const py::gil_scoped_acquire gil;
    py::list before;
    for (const auto& step : steps) before.append(step.fused ? py::cast(Opaque{step}) : (*modules)[step.first]);
    const py::list after(function(before, py::arg("recipe") = py::none()));
    std::vector<fused::Step> out;
    int next = 0;
    for (const auto item : after) out.push_back(step_from(item, *modules, next));
    TORCH_CHECK(next == static_cast<int>(modules->size()), "Fusion function '", name, "' returned a list that covers ",
                next, " of ", modules->size(), " operations.");
    return out;
  }

  struct Opaque {
    fused::Step step;
  };

  fused::Step step_from(py::handle item, const std::vector<py::object>& modules, int& next) const {
    if (py::isinstance<Opaque>(item)) {
      const auto step = item.cast<Opaque>().step;
      TORCH_CHECK(step.first == next, "Fusion function '", name, "' changed the order of operations.");
      next += step.count;
      return step;
    }
    const bool is_fused = item.attr("is_fused_op").cast<bool>();
    const py::list parts = is_fused ? py::list(item.attr("basic_ops")) : py::list(py::make_tuple(item));
    std::vector<PyFused::Shape> shapes;
    fused::Step step{.fused = {},
                     .first = next,
                     .count = static_cast<int>(parts.size()),
                     .min_rows = 0,
                     .rule = name,
                     .own_base = 0};
    for (const auto part : parts) {
      TORCH_CHECK(next < static_cast<int>(modules.size()) && modules[next].is(part), "Fusion function '", name,
                  "' must return the operations it was given, in order; position ", next, " is another object.");
      const auto& op = modules[next].attr("_description")().cast<const ops::BasicOp&>();
      shapes.push_back({pass == fused::Pass::joint || op.process_local(), op.extra_outputs(),
                        static_cast<int>(op.saved_names().size())});
      ++next;
    }
    if (!is_fused) return {.fused = {}, .first = step.first, .count = 1, .min_rows = 0, .rule = {}, .own_base = 0};
    step.rule = py::type::of(item).attr("__name__").cast<std::string>();
    step.fused = std::make_shared<PyFused>(py::reinterpret_borrow<py::object>(item), std::move(shapes));
    return step;
  }
};

int64_t add_function(const std::string& pass, const py::object& function, bool prepend) {
  const auto which = pass == "forward"    ? fused::Pass::forward
                     : pass == "backward" ? fused::Pass::backward
                                          : fused::Pass::joint;
  const auto name = py::str(py::getattr(function, "__qualname__", py::repr(function))).cast<std::string>();
  fused::FusionRule rule{
      .name = name, .pass = which, .pattern = {}, .refuse = {}, .make = {}, .sample = {}, .min_rows = 0, .rewrite = {}};
  // Rules are copied and dropped on any thread: the function is held by a pointer that dies under the GIL.
  const std::shared_ptr<Rewriter> rewriter(new Rewriter{name, function, which}, [](Rewriter* r) {
    const py::gil_scoped_acquire gil;
    delete r;
  });
  rule.rewrite = [rewriter](const auto& steps, const auto& view) { return (*rewriter)(steps, view); };
  return fused::add_rule(std::move(rule), prepend);
}

std::shared_ptr<ops::BasicOp> make_custom(const py::object& module, const py::list& params, int extra_inputs,
                                          int extra_outputs) {
  std::vector<ops::ParamSpec> specs;
  for (const auto name : params) specs.push_back({name.cast<std::string>(), {}, at::kFloat, ops::Init::zeros});
  return std::make_shared<PyOp>(module, std::move(specs), extra_inputs, extra_outputs);
}

}  // namespace

void bind_custom(py::module_& m) {
  py::class_<Rewriter::Opaque>(m, "FusedStep", "A run of operations that an earlier rule has taken.")
      .def_property_readonly("is_fused_op", [](const Rewriter::Opaque&) { return true; })
      .def_property_readonly("rule", [](const Rewriter::Opaque& o) { return o.step.rule; });
  m.def("set_bridge", [](py::object context, py::object forward, py::object backward) {
    bridge() = {std::move(context), std::move(forward), std::move(backward)};
  });
  m.def("make_custom_op", &make_custom, py::arg("module"), py::arg("params"), py::arg("extra_inputs"),
        py::arg("extra_outputs"));
  m.def("add_fusion_function", &add_function, py::arg("pass_"), py::arg("function"), py::arg("prepend"));
  m.def("remove_rule", [](int64_t id) {
    const py::gil_scoped_release release;
    fused::remove_rule(id);
  });
  m.def(
      "rules",
      [] {
        static constexpr const char* kPass[] = {"joint", "forward", "backward"};
        py::list list;
        for (const auto& [id, rule] : *fused::current_rules().list)
          list.append(py::make_tuple(rule.name, kPass[static_cast<int>(rule.pass)]));
        return list;
      },
      "Rules in force as (name, pass), in the order they are tried.");
}

}  // namespace weft::python
