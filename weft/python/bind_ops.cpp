#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include "weft/nn/linear.h"
#include "weft/ops/registry.h"
#include "weft/python/convert.h"
#include "weft/python/module.h"

namespace weft::python {
namespace {

ops::Keywords keywords_of(const std::string& owner, const py::dict& fields) {
  ops::Keywords list;
  for (const auto& [key, value] : fields) {
    const auto name = key.cast<std::string>();
    list.emplace_back(name, to_value(owner + ": " + name, value));
  }
  return list;
}

// Operations are immutable. The const_pointer_casts are for pybind11, which does not support pointers to const.

std::shared_ptr<ops::BasicOp> make_op(const std::string& name, const py::dict& fields) {
  return std::const_pointer_cast<ops::BasicOp>(ops::op_type(name).make(keywords_of(name, fields)));
}

std::vector<std::shared_ptr<ops::BasicOp>> linear_ops(const py::dict& fields) {
  nn::LinearOptions options;
  for (const auto& [name, value] : keywords_of("Linear", fields)) set_field(options, "Linear", name, value);
  std::vector<std::shared_ptr<ops::BasicOp>> list;
  for (const auto& op : nn::linear_ops(options)) list.push_back(std::const_pointer_cast<ops::BasicOp>(op));
  return list;
}

py::list params_of(const ops::BasicOp& op) {
  static constexpr const char* kInit[] = {"zeros", "ones", "fan_in_uniform"};  // in the order of ops::Init
  py::list list;
  for (const auto& spec : op.params()) {
    auto dtype = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(spec.dtype)));
    list.append(py::make_tuple(spec.name, py::tuple(py::cast(spec.shape)), dtype, kInit[static_cast<int>(spec.init)],
                               spec.fan_in, spec.supports_main_grad));
  }
  return list;
}

py::list types() {
  using namespace py::literals;
  static constexpr const char* kParamKinds[] = {"keyword", "positional", "required"};  // in the order of ParamKind
  py::list list;
  for (const auto& [name, type] : ops::op_types()) {
    py::list fields;
    for (size_t i = 0; i < type.fields.size(); ++i) {
      const auto& [field, value, kind] = type.fields[i];
      const auto& [annotation, description] = type.field_docs[i];
      fields.append(
          py::make_tuple(field, to_python(value), kParamKinds[static_cast<int>(kind)], annotation, description));
    }
    const auto& doc = type.doc;
    list.append(py::make_tuple(
        name,
        py::dict("summary"_a = doc.summary, "details"_a = doc.details, "parameters"_a = doc.parameters,
                 "shape"_a = doc.shape, "example_inputs"_a = doc.example_inputs, "example_shape"_a = doc.example_shape),
        fields, std::const_pointer_cast<ops::BasicOp>(type.sample)));
  }
  return list;
}

}  // namespace

void bind_ops(py::module_& m) {
  py::class_<ops::BasicOp, std::shared_ptr<ops::BasicOp>>(m, "Op",
                                                          "The description of a basic operation; holds no tensor.")
      .def_property_readonly("name", [](const ops::BasicOp& op) { return std::string(op.name()); })
      .def_property_readonly("extra_inputs", &ops::BasicOp::extra_inputs)
      .def_property_readonly("extra_outputs", &ops::BasicOp::extra_outputs)
      .def_property_readonly("quantizes", &ops::BasicOp::quantizes, "Whether recipes apply to it.")
      .def_property_readonly("takes_buffers", &ops::BasicOp::takes_buffers,
                             "Whether callers may pass buffers for its output and for the gradient of its input.")
      .def("is_index", &ops::BasicOp::is_index, py::arg("extra_input"), "Whether an extra input holds integers.")
      .def(
          "fields", [](const ops::BasicOp& op) { return to_python(op.fields()); }, "Field names and values.")
      .def("params", &params_of, "Parameters as (name, shape, dtype, init, fan_in, supports_main_grad).")
      .def("__repr__", &ops::BasicOp::brief)
      .def_property_readonly("text", &ops::BasicOp::text, "The description with every field, as in the pipeline text.")
      .def(  // an operation written in Python (process_local) is equal only to itself
          "__eq__",
          [](const ops::BasicOp& a, const ops::BasicOp& b) { return &a == &b || (!a.process_local() && a == b); },
          py::is_operator())
      .def("__hash__", [](const ops::BasicOp& op) { return std::hash<std::string>{}(op.text()); });
  m.def("make_op", &make_op, py::arg("name"), py::arg("fields"), "Creates a registered operation from its fields.");
  m.def("linear_ops", &linear_ops, py::arg("fields"), "Creates the basic operations of a Linear from its fields.");
  m.def(
      "linear_descriptions",
      [] {
        std::map<std::string, std::string> texts;
        std::apply([&](const auto&... field) { (texts.emplace(field.name, field.description), ...); },
                   nn::LinearOptions::fields());
        return texts;
      },
      "Descriptions of the fields of a Linear.");
  m.def("did_you_mean", &did_you_mean, py::arg("name"), py::arg("known"),
        "\" Did you mean 'bias'?\" with the nearest known name; empty if none is near.");
  m.def("op_types", &types,
        "Registered operations as (name, OpDoc as a dict, [(field, default, kind, type, description)], sample "
        "instance).");
}

}  // namespace weft::python
