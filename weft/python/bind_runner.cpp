#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <atomic>

#include "weft/fuser/explain.h"
#include "weft/python/bridge.h"
#include "weft/python/convert.h"
#include "weft/python/module.h"
#include "weft/quant/recipe.h"

namespace weft::python {
namespace {

/// Incremented whenever an attribute of any weft module is set; runners then revalidate themselves.
std::atomic<uint64_t> modules_version{1};

/// Whether new plans are logged: TORCH_LOGS="+torchweft".
std::atomic<bool> logs_plans{false};

/// The hook dictionaries that torch.nn.Module.__call__ reads.
constexpr const char* kHooks[] = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"};
constexpr const char* kGlobalHooks[] = {"_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                                        "_global_backward_pre_hooks"};

/// Whether the call must go through the dispatcher (done in Python): x is a FakeTensor, or a dispatch mode is active.
bool is_observed(PyObject* x) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python)) return true;
  return !THPVariable_CheckExact(x) && std::string_view(Py_TYPE(x)->tp_name) == "FakeTensor";
}

bool is_dtensor(PyObject* param) {
  return !THPVariable_CheckExact(param) && std::string_view(Py_TYPE(param)->tp_name) == "DTensor";
}

/// Interned names, which dictionary lookups compare by pointer.
struct Names {
  py::str parameters = intern("_parameters"), modules = intern("_modules"), forward = intern("forward");
  std::array<py::str, 4> hooks = intern_all(kHooks), global_hooks = intern_all(kGlobalHooks);

  static const Names& get() {
    static const auto* names = new Names;  // never destroyed: the interpreter may be finalized first
    return *names;
  }

 private:
  static py::str intern(const char* name) { return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name)); }
  static std::array<py::str, 4> intern_all(const char* const (&names)[4]) {
    return {intern(names[0]), intern(names[1]), intern(names[2]), intern(names[3])};
  }
};

/// An object's current `__dict__`; user code may replace it.
py::object dict_of(const py::object& object) {
  auto* dict = PyObject_GenericGetDict(object.ptr(), nullptr);
  if (!dict) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(dict);
}

/// A borrowed reference, or nullptr if there is no such item.
PyObject* item(const py::object& dict, const py::str& name) {
  auto* found = PyDict_GetItemWithError(dict.ptr(), name.ptr());
  if (!found && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

bool is_empty_dict(PyObject* object) { return object && PyDict_Check(object) && PyDict_GET_SIZE(object) == 0; }

/// A module whose `__call__` the pipeline bypasses. It must have no hooks and no instance attribute `forward`, and its
/// class must be unchanged since `record_class`.
class Bypassed {
 public:
  explicit Bypassed(py::object module) : module_(std::move(module)) { record_class(); }

  /// Records the class and its version tag, which changes with each attribute set on the class or a base.
  void record_class() {
    type_ = Py_TYPE(module_.ptr());
    (void)py::getattr(module_, "forward");  // a lookup assigns a version tag if the class has none
    version_ = type_->tp_version_tag;
  }

  bool unchanged() const {
    if (Py_TYPE(module_.ptr()) != type_ || type_->tp_version_tag != version_ || version_ == 0) return false;
    const auto dict = dict_of(module_);
    const auto& names = Names::get();
    for (const auto& hooks : names.hooks)
      if (!is_empty_dict(item(dict, hooks))) return false;
    return !item(dict, names.forward);
  }

  const py::object& module() const { return module_; }

 private:
  py::object module_;
  PyTypeObject* type_ = nullptr;
  unsigned int version_ = 0;
};

/// A pipeline bound to Python modules. Reads the modules' current parameters in each call and runs the pipeline.
/// Detects module changes that need another pipeline (`stale`). Everything that Python code may replace (dictionaries,
/// classes, hooks) is read in each call.
class Runner {
 public:
  using ParamSlot = std::pair<py::object, py::str>;  // module, name

  /// `owner`: the module that calls it. `ops`: the Python object of each stage. `params`: (module, name) of each
  /// parameter. `seen_version`: `modules_version` before the modules were read. `bypassed`: modules whose `__call__` is
  /// bypassed. `expected`: the required children of `owner`, or None.
  Runner(std::shared_ptr<fuser::Fuser> fuser, py::object owner, std::vector<py::object> ops,
         std::vector<ParamSlot> params, uint64_t seen_version, const py::list& bypassed, const py::object& expected)
      : fuser_(std::move(fuser)),
        seen_version_(seen_version),
        owner_(std::move(owner)),
        container_(!expected.is_none()),
        ops_(std::move(ops)),
        params_(std::move(params)) {
    for (int i = 0; i < fuser_->pipeline().size(); ++i)
      if (fuser_->pipeline().eval_bit(i) >= 0) modes_.push_back(ops_[i]);
    for (const auto module : bypassed) bypassed_.emplace_back(py::reinterpret_borrow<py::object>(module));
    if (container_)
      for (const auto child : expected) expected_.push_back(py::reinterpret_borrow<py::object>(child));
    if (!bypassed_.empty()) torch_module_ = py::module_::import("torch.nn.modules.module").attr("__dict__");
  }

  /// True if hooks, classes or children changed since the last validation, or if an attribute of any weft module was
  /// set.
  bool stale() const {
    if (seen_version_ != modules_version.load(std::memory_order_relaxed)) return true;
    for (const auto& module : bypassed_)
      if (!module.unchanged()) return true;
    if (torch_module_)
      for (const auto& hooks : Names::get().global_hooks)
        if (!is_empty_dict(item(torch_module_, hooks))) return true;
    return container_ && !same_children();
  }

  /// Called after Python code verified that the runner still matches its modules.
  void revalidate(uint64_t seen_version) {
    seen_version_ = seen_version;
    for (auto& module : bypassed_) module.record_class();
  }

  /// Arguments: the calling module, then the tensors. Returns the outputs, or NotImplemented if the runner is stale,
  /// belongs to another module (a copied `__dict__`), or the call must go through the dispatcher.
  py::object call(PyObject* args) const {
    TORCH_CHECK_TYPE(PyTuple_GET_SIZE(args) > 1, label(), ": expected an input tensor, got no arguments.");
    if (PyTuple_GET_ITEM(args, 0) != owner_.ptr() || is_observed(PyTuple_GET_ITEM(args, 1)) || stale())
      return py::reinterpret_borrow<py::object>(Py_NotImplemented);
    return run(args, /*first=*/1, nullptr);
  }

  /// Arguments: a dictionary of keyword arguments for each operation, then the tensors. Does not check for staleness.
  py::object call_with(const py::list& keywords, const py::args& args) const {
    return run(args.ptr(), /*first=*/0, keywords.ptr());
  }

  std::shared_ptr<const fuser::Plan> plan(const py::args& args) const {
    auto [x, extras] = tensors(args.ptr());
    const auto params = current_parameters();
    const auto mask = eval_mask();
    const PythonCallGuard guard({&ops_, nullptr});
    const py::gil_scoped_release release;
    return fuser_->plan(x, params, extras, mask);
  }

  fuser::Explanation explain(const py::args& args) const {
    auto [x, extras] = tensors(args.ptr());
    const auto params = current_parameters();
    const auto mask = eval_mask();
    const PythonCallGuard guard({&ops_, nullptr});
    const py::gil_scoped_release release;
    return fuser::explain(*fuser_, x, params, extras, mask);
  }

  const std::shared_ptr<fuser::Fuser>& fuser() const { return fuser_; }
  const std::vector<py::object>& modes() const { return modes_; }
  const std::vector<ParamSlot>& parameter_slots() const { return params_; }
  /// The tensors that the modules hold now, in the order of the slots.
  c10::SmallVector<at::Tensor, 8> current_parameters() const {
    c10::SmallVector<at::Tensor, 8> params;
    py::object dict, parameters;
    PyObject* previous = nullptr;
    for (const auto& [module, name] : params_) {
      if (module.ptr() != previous) {
        previous = module.ptr();
        dict = dict_of(module);
        parameters = py::reinterpret_borrow<py::object>(item(dict, Names::get().parameters));
      }
      PyObject* found = parameters && PyDict_Check(parameters.ptr()) ? item(parameters, name) : nullptr;
      py::object computed;
      if (!found || found == Py_None) {  // computed by an attribute, e.g. a parametrization
        computed = py::getattr(module, name);
        found = computed.ptr();
      }
      if (found == Py_None)
        TORCH_CHECK_TYPE(false, "weft: parameter '", name.cast<std::string>(), "' of ", Py_TYPE(module.ptr())->tp_name,
                         " is None, expected a tensor. Set it, or create the module without it.");
      if (is_dtensor(found)) {
        computed = py::module_::import("torchweft.parallel").attr("local_shard")(module, name, py::handle(found));
        found = computed.ptr();
      }
      params.push_back(to_tensor(found, Py_TYPE(module.ptr())->tp_name, "a parameter"));
    }
    return params;
  }
  /// One bit for each operation of `modes`, set if it is in evaluation mode.
  uint64_t eval_mask() const {
    uint64_t mask = 0;
    for (size_t bit = 0; bit < modes_.size(); ++bit)
      if (!modes_[bit].attr("training").cast<bool>()) mask |= uint64_t{1} << bit;
    return mask;
  }
  /// The input at index `first` of `args`, and the extra inputs after it.
  std::pair<at::Tensor, fuser::Tensors> tensors(PyObject* args, Py_ssize_t first = 0) const {
    const auto count = PyTuple_GET_SIZE(args);
    TORCH_CHECK_TYPE(count > first, label(), ": expected an input tensor, got no arguments.");
    fuser::Tensors extras;
    for (auto k = first + 1; k < count; ++k)
      extras.push_back(to_tensor(PyTuple_GET_ITEM(args, k), label(), "an extra input"));
    return {to_tensor(PyTuple_GET_ITEM(args, first), label(), "the input"), std::move(extras)};
  }

  /// For garbage collection: calls `fn` with each Python object that may be part of a reference cycle.
  template <class Fn>
  void visit(Fn&& fn) const {
    fn(owner_);
    for (const auto& op : ops_) fn(op);
    for (const auto& param : params_) fn(param.first);
    for (const auto& module : bypassed_) fn(module.module());
    for (const auto& child : expected_) fn(child);
  }
  /// For garbage collection: releases these objects. The runner is stale from then on.
  void clear() {
    owner_ = py::none();
    ops_.clear();
    modes_.clear();
    params_.clear();
    bypassed_.clear();
    expected_.clear();
    seen_version_ = 0;
  }

 private:
  /// What errors call the first operation, which takes the input.
  std::string_view label() const {
    return fuser_->pipeline().size() > 0 ? fuser_->pipeline().label(0) : std::string_view("weft");
  }

  bool same_children() const {
    const auto dict = dict_of(owner_);
    auto* children = item(dict, Names::get().modules);
    if (!children || !PyDict_Check(children)) return false;
    if (PyDict_GET_SIZE(children) != static_cast<Py_ssize_t>(expected_.size())) return false;
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t pos = 0;
    for (const auto& child : expected_)
      if (!PyDict_Next(children, &pos, &key, &value) || value != child.ptr()) return false;
    return true;
  }

  /// Adds the states of delayed scaling, which modules own.
  void add_delayed_states(std::vector<ops::Buffers>& list) const {
    const auto use_state = py::module_::import("torchweft._delayed_scaling").attr("use_state");
    for (int i = 0; i < fuser_->pipeline().size(); ++i) {
      if (!fuser_->pipeline().op(i).quantizes()) continue;
      auto [forward, backward] = use_state(ops_[i]).cast<std::pair<at::Tensor, at::Tensor>>();
      list.push_back({.op = i, .forward_scaling = std::move(forward), .backward_scaling = std::move(backward)});
    }
  }

  /// The buffers among the keyword arguments (a list of dictionaries, or nullptr), for operations with takes_buffers().
  std::vector<ops::Buffers> buffers_of(PyObject* keywords) const {
    std::vector<ops::Buffers> list;
    if (!keywords) return list;
    for (int i = 0; i < fuser_->pipeline().size(); ++i) {
      const auto kwargs = py::reinterpret_borrow<py::dict>(PyList_GetItem(keywords, i));
      if (kwargs.empty() || !fuser_->pipeline().op(i).takes_buffers()) continue;
      const auto tensor = [&](const char* name) {
        const py::object found = kwargs.attr("get")(name);
        return found.is_none() ? at::Tensor() : to_tensor(found.ptr(), fuser_->pipeline().label(i), name);
      };
      list.push_back({.op = i, .output = tensor("output"), .grad_input = tensor("grad_input")});
    }
    return list;
  }

  /// Logs the plan of a call that has none yet.
  void log_new_plan(const at::Tensor& x, ops::Params params, c10::ArrayRef<at::Tensor> extras, uint64_t mask) const {
    std::string text;
    {
      const PythonCallGuard guard({&ops_, nullptr});
      const py::gil_scoped_release release;
      const auto before = fuser_->plans_made();
      fuser_->plan(x, params, extras, mask);
      if (fuser_->plans_made() != before) text = fuser::explain(*fuser_, x, params, extras, mask).text();
    }
    if (!text.empty()) py::module_::import("torchweft._log").attr("log_plan")(label(), text);
  }

  /// Raises under make_fx, which would record the results of this call as constants.
  void check_not_recorded() const {
    using c10::impl::TorchDispatchModeTLS;
    const bool recorded = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python) &&
                          TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !recorded,
        "weft: make_fx cannot trace a pipeline with operations written in Python, delay_wgrad_compute or keyword "
        "arguments. Exclude it from the traced function.");
  }

  /// The tensors start at index `first` of `args`.
  py::object run(PyObject* args, Py_ssize_t first, PyObject* keywords) const {
    check_not_recorded();
    auto [x, extras] = tensors(args, first);
    const auto params = current_parameters();
    const auto mask = modes_.empty() ? 0 : eval_mask();
    const auto* recipe = fuser_->pipeline().quantizes() ? quant::find_recipe(quant::active_recipe()) : nullptr;
    if (logs_plans.load(std::memory_order_relaxed)) log_new_plan(x, params, extras, mask);
    auto buffers = buffers_of(keywords);
    const bool delayed = recipe && recipe->is_delayed();
    if (delayed) add_delayed_states(buffers);
    fuser::Tensors outputs;
    {
      const PythonCallGuard guard({&ops_, keywords});
      const py::gil_scoped_release release;
      outputs = (*fuser_)(x, params, std::move(extras), mask, buffers);
    }
    if (delayed && outputs[0].requires_grad())
      py::module_::import("torchweft._delayed_scaling").attr("update_after_backward")(outputs[0]);
    if (outputs.size() == 1) return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(outputs[0])));
    py::tuple result(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i)
      result[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(outputs[i])));
    return result;
  }

  std::shared_ptr<fuser::Fuser> fuser_;
  uint64_t seen_version_;
  py::object owner_;
  bool container_;  // `owner_` holds the operations as children
  std::vector<py::object> ops_;
  std::vector<py::object> modes_;     // the operations that depend on training mode, in the order of eval_mask's bits
  std::vector<py::object> expected_;  // children that `owner_` must have, if `container_`
  std::vector<ParamSlot> params_;
  std::vector<Bypassed> bypassed_;
  py::object torch_module_;  // __dict__ of torch.nn.modules.module, which holds the global hooks
};

Runner& runner_of(PyObject* self) {
  return *reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().value_ptr<Runner>();
}

/// tp_call; avoids the overhead of pybind11's overload resolution.
PyObject* call_runner(PyObject* self, PyObject* args, PyObject* keywords) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(!keywords || PyDict_GET_SIZE(keywords) == 0, "weft: a runner takes no keyword arguments.");
  return runner_of(self).call(args).release().ptr();
  END_HANDLE_TH_ERRORS
}

/// Sets tp_call and supports garbage collection, since runners and modules form reference cycles.
void set_up_type(PyHeapTypeObject* heap) {
  auto* type = &heap->ht_type;
  type->tp_call = call_runner;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    int failed = 0;
    runner_of(self).visit([&](const py::object& o) {
      if (!failed && o.ptr()) failed = visit(o.ptr(), arg);
    });
    return failed;
  };
  type->tp_clear = [](PyObject* self) -> int {
    if (py::detail::is_holder_constructed(self)) runner_of(self).clear();
    return 0;
  };
}

/// From (op, [input channel or None], [(output channel or None, output_to_caller)], label).
fuser::Stage stage_from(const py::tuple& item) {
  fuser::Stage stage{.op = item[0].cast<std::shared_ptr<ops::BasicOp>>()};
  for (const auto channel : item[1].cast<py::list>())
    stage.in.push_back(channel.is_none() ? std::string{} : channel.cast<std::string>());
  for (const auto out : item[2].cast<py::list>()) {
    const auto pair = out.cast<py::tuple>();
    stage.out.push_back({pair[0].is_none() ? std::string{} : pair[0].cast<std::string>(), pair[1].cast<bool>()});
  }
  stage.label = item[3].cast<std::string>();
  return stage;
}

std::vector<fuser::Stage> stages_from(const py::list& items) {
  std::vector<fuser::Stage> stages;
  for (const auto item : items) stages.push_back(stage_from(item.cast<py::tuple>()));
  return stages;
}

/// The rule of each step; empty for a basic operation.
std::vector<std::string> rules_of(const std::vector<fuser::PlannedStep>& steps) {
  std::vector<std::string> rules;
  for (const auto& planned : steps) rules.push_back(planned.step.fused ? planned.step.rule : "");
  return rules;
}

}  // namespace

void bind_runner(py::module_& m) {
  py::class_<fuser::Plan, std::shared_ptr<fuser::Plan>>(m, "Plan", "How a pipeline runs for one kind of call.")
      .def_property_readonly("forward_rules", [](const fuser::Plan& plan) { return rules_of(plan.forward); })
      .def_property_readonly("backward_rules", [](const fuser::Plan& plan) { return rules_of(plan.backward); });
  py::class_<Runner>(m, "Runner", py::custom_type_setup(set_up_type),
                     "A pipeline bound to the modules that hold its parameters.")
      .def(py::init([](const py::list& stages, py::object owner, std::vector<py::object> ops,
                       std::vector<Runner::ParamSlot> params, uint64_t seen_version, const py::list& bypassed,
                       const py::object& expected) {
             return std::make_unique<Runner>(std::make_shared<fuser::Fuser>(fuser::Pipeline(stages_from(stages))),
                                             std::move(owner), std::move(ops), std::move(params), seen_version,
                                             bypassed, expected);
           }),
           py::arg("stages"), py::arg("owner"), py::arg("ops"), py::arg("params"), py::arg("modules_version"),
           py::arg("bypassed"), py::arg("expected"))
      .def("call_with", &Runner::call_with, "Runs the pipeline with a dictionary of keyword arguments per operation.")
      .def("explain", &Runner::explain)
      .def("revalidate", &Runner::revalidate, "Marks the runner as matching its modules at this modules_version.")
      .def("plan",
           [](const Runner& r, const py::args& args) { return std::const_pointer_cast<fuser::Plan>(r.plan(args)); })
      .def_property_readonly("text", [](const Runner& r) { return r.fuser()->pipeline().text(); })
      .def_property_readonly("parameter_slots", &Runner::parameter_slots, "(module, name) of each parameter.")
      .def_property_readonly("modes", &Runner::modes, "The operations that depend on training mode.")
      .def_property_readonly("plans_made", [](const Runner& r) { return r.fuser()->plans_made(); })
      .def_property_readonly("plans_kept", [](const Runner& r) { return r.fuser()->plans_kept(); });
  m.def(
      "check_channels", [](const py::list& stages) { fuser::channel_sources(stages_from(stages)); }, py::arg("stages"),
      "Raises ValueError unless each channel that is read has exactly one producer, an earlier operation.");
  m.def(
      "invalidate_runners", [] { ++modules_version; },
      "Makes every runner check whether it still matches its modules.");
  m.def("set_plan_logging", [](bool on) { logs_plans = on; }, py::arg("on"), "Whether new plans are logged.");
  m.def("modules_version", [] { return modules_version.load(); }, "The number of invalidations so far.");
}

}  // namespace weft::python
