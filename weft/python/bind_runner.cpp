#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>

#include "weft/fuser/explain.h"
#include "weft/python/bridge.h"
#include "weft/python/convert.h"
#include "weft/python/module.h"

namespace weft::python {
namespace {

/// Changes whenever an attribute of some weft module is set: then runners look again whether they still fit.
std::atomic<uint64_t> epoch{1};

/// The hook dictionaries that torch.nn.Module.__call__ looks at.
constexpr const char* kHooks[] = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"};
constexpr const char* kGlobalHooks[] = {"_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                                        "_global_backward_pre_hooks"};

/// A FakeTensor goes through the dispatcher, which Python does.
bool is_fake(PyObject* args) {
  PyObject* x = PyTuple_GET_SIZE(args) == 0 ? nullptr : PyTuple_GET_ITEM(args, 0);
  return x && !THPVariable_CheckExact(x) && std::string_view(Py_TYPE(x)->tp_name) == "FakeTensor";
}

/// A pipeline as a Python module calls it: gathers the parameters that the modules hold at this moment and runs. Knows
/// when the modules have changed in a way that needs another pipeline (`stale`).
class Runner {
 public:
  /// `ops`: the Python object of each stage. `params`: (module, name) of each parameter. `watched`: modules that must
  /// have no hooks. `children`: a container's `_modules` and the modules it held, or None.
  Runner(std::shared_ptr<fuser::Fuser> fuser, const py::list& ops, const py::list& params, uint64_t seen,
         const py::list& watched, const py::object& children, const py::list& expected)
      : fuser_(std::move(fuser)), epoch_(seen), children_(children) {
    for (const auto op : ops) ops_.push_back(py::reinterpret_borrow<py::object>(op));
    for (int i = 0; i < fuser_->pipeline().size(); ++i)
      if (fuser_->pipeline().eval_bit(i) >= 0) modes_.push_back(ops_[i]);
    for (const auto item : params) {
      const auto pair = item.cast<py::tuple>();
      params_.push_back({pair[0], pair[0].attr("_parameters"), pair[1]});
    }
    for (const auto module : watched)
      for (const auto* name : kHooks) hooks_.push_back(module.attr(name));
    const auto torch_module = py::module_::import("torch.nn.modules.module");
    for (const auto* name : kGlobalHooks)
      if (!watched.empty()) hooks_.push_back(torch_module.attr(name));
    for (const auto child : expected) expected_.push_back(py::reinterpret_borrow<py::object>(child));
  }

  /// True if hooks or container have changed since construction, or an attribute of some module may have.
  bool stale() const {
    if (epoch_ != epoch.load(std::memory_order_relaxed)) return true;
    for (const auto& hooks : hooks_)
      if (PyDict_GET_SIZE(hooks.ptr()) != 0) return true;
    if (children_.is_none()) return false;
    if (PyDict_GET_SIZE(children_.ptr()) != static_cast<Py_ssize_t>(expected_.size())) return true;
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t at = 0;
    for (const auto& child : expected_)
      if (!PyDict_Next(children_.ptr(), &at, &key, &value) || value != child.ptr()) return true;
    return false;
  }

  /// The Python side looked and found it still fits.
  void renew(uint64_t seen) { epoch_ = seen; }

  /// The outputs, or NotImplemented if it no longer fits; `args` is a tuple.
  py::object call(PyObject* args) const {
    if (stale() || is_fake(args)) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
    return run(args, nullptr);
  }

  py::object call_with(const py::list& keywords, const py::args& args) const { return run(args.ptr(), keywords.ptr()); }

  std::shared_ptr<const fuser::Plan> plan(const py::args& args) const {
    auto [x, extras] = tensors(args.ptr());
    const auto held = gather();
    const auto mask = eval_mask();
    const ScopeGuard guard({&ops_, nullptr});
    const py::gil_scoped_release release;
    return fuser_->plan(x, held, extras, mask);
  }

  fuser::Explanation explain(const py::args& args) const {
    auto [x, extras] = tensors(args.ptr());
    const auto held = gather();
    const auto mask = eval_mask();
    const ScopeGuard guard({&ops_, nullptr});
    const py::gil_scoped_release release;
    return fuser::explain(*fuser_, x, held, extras, mask);
  }

  const std::shared_ptr<fuser::Fuser>& fuser() const { return fuser_; }
  c10::SmallVector<at::Tensor, 8> gather() const {
    c10::SmallVector<at::Tensor, 8> held;
    for (const auto& [module, dict, name] : params_) {
      PyObject* found = PyDict_GetItemWithError(dict.ptr(), name.ptr());
      py::object other;
      if (!found || found == Py_None) {  // parametrizations and the like compute it
        other = py::getattr(module, name);
        found = other.ptr();
      }
      if (found == Py_None)
        TORCH_CHECK_TYPE(false, "weft: ", Py_TYPE(module.ptr())->tp_name, " has no parameter '",
                         name.cast<std::string>(), "': it is None. Set it, or make the module without it.");
      held.push_back(to_tensor(found, "a parameter"));
    }
    return held;
  }
  uint64_t eval_mask() const {
    uint64_t mask = 0;
    for (size_t bit = 0; bit < modes_.size(); ++bit)
      if (!modes_[bit].attr("training").cast<bool>()) mask |= uint64_t{1} << bit;
    return mask;
  }
  static std::pair<at::Tensor, fuser::Tensors> tensors(PyObject* args) {
    const auto count = PyTuple_GET_SIZE(args);
    TORCH_CHECK_TYPE(count > 0, "weft: the call needs an input tensor.");
    fuser::Tensors extras;
    for (Py_ssize_t k = 1; k < count; ++k) extras.push_back(to_tensor(PyTuple_GET_ITEM(args, k), "an extra input"));
    return {to_tensor(PyTuple_GET_ITEM(args, 0), "the input"), std::move(extras)};
  }

  template <class Visit>
  void visit(Visit&& one) const {
    for (const auto& op : ops_) one(op);
    for (const auto& param : params_) {
      one(param.module);
      one(param.dict);
    }
    for (const auto& hooks : hooks_) one(hooks);
    for (const auto& child : expected_) one(child);
    one(children_);
  }
  void clear() {
    ops_.clear();
    modes_.clear();
    params_.clear();
    hooks_.clear();
    expected_.clear();
    children_ = py::none();
    epoch_ = 0;
  }

 private:
  struct Param {
    py::object module, dict, name;
  };

  /// Of the keyword arguments, those of operations that take memory for their results.
  std::vector<ops::Buffers> buffers_of(PyObject* keywords) const {
    std::vector<ops::Buffers> list;
    if (!keywords) return list;
    for (int i = 0; i < fuser_->pipeline().size(); ++i) {
      const auto given = py::reinterpret_borrow<py::dict>(PyList_GetItem(keywords, i));
      if (given.empty() || !fuser_->pipeline().op(i).takes_buffers()) continue;
      const auto tensor = [&](const char* name) {
        const py::object found = given.attr("get")(name);
        return found.is_none() ? at::Tensor() : to_tensor(found.ptr(), name);
      };
      list.push_back({.op = i, .output = tensor("output"), .grad_input = tensor("grad_input")});
    }
    return list;
  }

  py::object run(PyObject* args, PyObject* keywords) const {
    auto [x, extras] = tensors(args);
    const auto held = gather();
    const auto mask = modes_.empty() ? 0 : eval_mask();
    const auto buffers = buffers_of(keywords);
    fuser::Tensors outputs;
    {
      const ScopeGuard guard({&ops_, keywords});
      const py::gil_scoped_release release;
      outputs = (*fuser_)(x, held, std::move(extras), mask, buffers);
    }
    if (outputs.size() == 1) return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(outputs[0])));
    py::tuple result(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i)
      result[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(outputs[i])));
    return result;
  }

  std::shared_ptr<fuser::Fuser> fuser_;
  uint64_t epoch_;
  std::vector<py::object> ops_, modes_, hooks_, expected_;
  std::vector<Param> params_;
  py::object children_;
};

Runner& runner_of(PyObject* self) {
  return *reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().value_ptr<Runner>();
}

/// Called thousands of times a second: without pybind11's search for an overload.
PyObject* call_runner(PyObject* self, PyObject* args, PyObject* keywords) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(!keywords || PyDict_GET_SIZE(keywords) == 0, "weft: a runner takes no keyword arguments.");
  return runner_of(self).call(args).release().ptr();
  END_HANDLE_TH_ERRORS
}

/// Runner and modules point at each other: Python's collector must see it.
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

fuser::Stage stage_from(const py::tuple& item) {
  fuser::Stage stage{.op = item[0].cast<std::shared_ptr<ops::BasicOp>>(), .in = {}, .out = {}};
  for (const auto channel : item[1].cast<py::list>())
    stage.in.push_back(channel.is_none() ? std::string{} : channel.cast<std::string>());
  for (const auto out : item[2].cast<py::list>()) {
    const auto pair = out.cast<py::tuple>();
    stage.out.push_back({pair[0].is_none() ? std::string{} : pair[0].cast<std::string>(), pair[1].cast<bool>()});
  }
  return stage;
}

}  // namespace

void bind_runner(py::module_& m) {
  py::class_<fuser::Plan, std::shared_ptr<fuser::Plan>>(m, "Plan", "How a pipeline runs for one kind of call.")
      .def_property_readonly("forward_rules",
                             [](const fuser::Plan& plan) {
                               std::vector<std::string> rules;
                               for (const auto& s : plan.forward) rules.push_back(s.step.fused ? s.step.rule : "");
                               return rules;
                             })
      .def_property_readonly("backward_rules", [](const fuser::Plan& plan) {
        std::vector<std::string> rules;
        for (const auto& s : plan.backward) rules.push_back(s.step.fused ? s.step.rule : "");
        return rules;
      });
  py::class_<Runner>(m, "Runner", py::custom_type_setup(set_up_type),
                     "A pipeline bound to the modules that hold its parameters.")
      .def(py::init([](const py::list& stages, const py::list& ops, const py::list& params, uint64_t seen,
                       const py::list& watched, const py::object& children, const py::list& expected) {
             std::vector<fuser::Stage> list;
             for (const auto item : stages) list.push_back(stage_from(item.cast<py::tuple>()));
             return std::make_unique<Runner>(std::make_shared<fuser::Fuser>(fuser::Pipeline(std::move(list))), ops,
                                             params, seen, watched, children, expected);
           }),
           py::arg("stages"), py::arg("ops"), py::arg("params"), py::arg("epoch"), py::arg("watched"),
           py::arg("children"), py::arg("expected"))
      .def("call_with", &Runner::call_with, "As a call, with keyword arguments for each operation.")
      .def("explain", &Runner::explain)
      .def("stale", &Runner::stale)
      .def("renew", &Runner::renew)
      .def("plan",
           [](const Runner& r, const py::args& args) { return std::const_pointer_cast<fuser::Plan>(r.plan(args)); })
      .def_property_readonly("text", [](const Runner& r) { return r.fuser()->pipeline().text(); })
      .def_property_readonly("num_extra_inputs",
                             [](const Runner& r) { return r.fuser()->pipeline().caller_inputs().size(); })
      .def_property_readonly("num_extra_outputs",
                             [](const Runner& r) { return r.fuser()->pipeline().caller_outputs().size(); })
      .def_property_readonly("plans_made", [](const Runner& r) { return r.fuser()->plans_made(); })
      .def_property_readonly("plans_kept", [](const Runner& r) { return r.fuser()->plans_kept(); });
  m.def("touch", [] { ++epoch; }, "Tells every runner to look again whether it still fits its modules.");
  m.def("epoch", [] { return epoch.load(); }, "How often runners were told so.");
}

}  // namespace weft::python
