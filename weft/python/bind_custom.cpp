#include "weft/fused/rules.h"
#include "weft/python/bridge.h"
#include "weft/python/custom_op.h"
#include "weft/python/module.h"

namespace weft::python {
namespace {

/// A fusion function written in Python, as a rule. It receives and returns a list of steps: the module of a basic
/// operation, a FusedOperation, or an Opaque step that an earlier rule created.
struct Rewriter {
  std::string name;
  py::object function;
  fused::Pass pass;

  std::vector<fused::Step> operator()(const std::vector<fused::Step>& steps, const fused::PlanView& view) const {
    const auto* modules = current_call().ops;
    if (!modules) return steps;  // a pipeline created in C++ has no Python objects
    const py::gil_scoped_acquire gil;
    py::list before;
    for (const auto& step : steps) before.append(step.fused ? py::cast(Opaque{step}) : (*modules)[step.first]);
    const py::list after(function(before, py::arg("recipe") = py::none()));
    std::vector<fused::Step> out;
    int next = 0;
    for (const auto item : after) out.push_back(step_from(item, *modules, view, next));
    TORCH_CHECK(next == static_cast<int>(modules->size()), "Fusion function '", name, "' returned a list that covers ",
                next, " of ", modules->size(), " operations; expected all of them.");
    return out;
  }

  struct Opaque {
    fused::Step step;
  };

  fused::Step step_from(py::handle item, const std::vector<py::object>& modules, const fused::PlanView& view,
                        int& next) const {
    if (py::isinstance<Opaque>(item)) {
      const auto step = item.cast<Opaque>().step;
      TORCH_CHECK(step.first == next, "Fusion function '", name,
                  "' changed the order of operations: expected operation ", next, ", got operation ", step.first, ".");
      next += step.count;
      return step;
    }
    const bool is_fused = item.attr("is_fused_op").cast<bool>();
    const py::list components = is_fused ? py::list(item.attr("basic_ops")) : py::list(py::make_tuple(item));
    std::vector<PyFused::ComponentInfo> infos;
    fused::Step step{.first = next, .count = static_cast<int>(components.size()), .rule = name};
    for (const auto component : components) {
      TORCH_CHECK(next < static_cast<int>(modules.size()) && modules[next].is(component), "Fusion function '", name,
                  "' must return the operations it was given, in order; index ", next, " is another object.");
      const auto& op = modules[next].attr("_description")().cast<const ops::BasicOp&>();
      infos.push_back({pass == fused::Pass::joint || op.process_local(), op.extra_outputs(),
                       static_cast<int>(op.saved_names().size()) - int{op.quantizes()}, op.weight_slot(),
                       view.compute_dtypes[next]});
      ++next;
    }
    if (!is_fused) return {.first = step.first};
    step.rule = py::type::of(item).attr("__name__").cast<std::string>();
    const auto op = std::make_shared<const PyFused>(py::reinterpret_borrow<py::object>(item), std::move(infos));
    step.fused = pass == fused::Pass::forward    ? fused::FusedPtr(std::shared_ptr<const fused::ForwardFusion>(op))
                 : pass == fused::Pass::backward ? fused::FusedPtr(std::shared_ptr<const fused::BackwardFusion>(op))
                                                 : fused::FusedPtr(op);
    return step;
  }
};

int64_t add_function(const std::string& pass, const py::object& function, bool prepend) {
  const auto which = fused::pass_from_name(pass);
  const auto name = py::str(py::getattr(function, "__qualname__", py::repr(function))).cast<std::string>();
  const auto rewriter = hold(Rewriter{name, function, which});  // rules are copied and destroyed on any thread
  return fused::add_rule(
      fused::RewriteRule{name, which,
                         [rewriter](const auto& steps, const auto& view) { return (*rewriter)(steps, view); }},
      prepend);
}

std::shared_ptr<ops::BasicOp> make_custom(const py::object& module, const py::list& params, int extra_inputs,
                                          int extra_outputs) {
  std::vector<ops::ParamSpec> specs;
  for (const auto name : params) specs.push_back({.name = name.cast<std::string>(), .shape = {}, .any_shape = true});
  return std::make_shared<PyOp>(module, std::move(specs), extra_inputs, extra_outputs);
}

py::list names_of(const fused::RuleList& rules) {
  py::list list;
  for (const auto& [id, rule] : rules)
    list.append(py::make_tuple(fused::name_of(rule), fused::pass_name(fused::pass_of(rule))));
  return list;
}

}  // namespace

void bind_custom(py::module_& m) {
  py::class_<Rewriter::Opaque>(m, "FusedStep", "A run of operations that an earlier rule fused.")
      .def_property_readonly("is_fused_op", [](const Rewriter::Opaque&) { return true; })
      .def_property_readonly("rule", [](const Rewriter::Opaque& o) { return o.step.rule; });
  m.def("set_bridge", &set_bridge, py::arg("context"), py::arg("forward"), py::arg("backward"));
  m.def("make_custom_op", &make_custom, py::arg("module"), py::arg("params"), py::arg("extra_inputs"),
        py::arg("extra_outputs"));
  m.def("add_fusion_function", &add_function, py::arg("pass_"), py::arg("function"), py::arg("prepend"));
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;  // a list of rules is changed under a lock
  m.def("remove_rule", &fused::remove_rule, ReleaseGil());
  m.def(
      "rule_ids",
      [](const std::vector<std::string>& names) {
        std::vector<int64_t> ids;
        for (const auto& [id, rule] : *fused::all_rules())
          if (std::find(names.begin(), names.end(), fused::name_of(rule)) != names.end()) ids.push_back(id);
        return ids;
      },
      py::arg("names"), "Ids of the rules with these names.");
  m.def("disable_rules", &fused::disable_rules, py::arg("ids"), ReleaseGil(), "Disables rules; calls are counted.");
  m.def("enable_rules", &fused::enable_rules, py::arg("ids"), ReleaseGil(),
        "Enables rules; returns the ids that were disabled.");
  m.def(
      "rules", [] { return names_of(*fused::current_rules().list); },
      "Name and pass of each enabled rule, in the order in which they are tried.");
  m.def("all_rules", [] { return names_of(*fused::all_rules()); }, "Name and pass of each rule, enabled or not.");
}

}  // namespace weft::python
