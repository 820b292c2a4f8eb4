#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include "weft/ops/registry.h"
#include "weft/python/convert.h"
#include "weft/python/module.h"

namespace weft::python {
namespace {

ops::OpPtr make_op(const std::string& name, const py::dict& keywords) {
  ops::Keywords list;
  for (const auto& [key, value] : keywords) {
    const auto word = key.cast<std::string>();
    list.emplace_back(word, to_value(name + ": " + word, value));
  }
  return ops::op_type(name).make(list);
}

py::dict fields_of(const ops::BasicOp& op) {
  py::dict fields;
  for (const auto& field : op.fields()) fields[py::str(field.name)] = to_python(field.value);
  return fields;
}

py::list params_of(const ops::BasicOp& op) {
  static constexpr const char* kInit[] = {"zeros", "ones", "fan_in_uniform"};
  py::list list;
  for (const auto& spec : op.params()) {
    auto dtype = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(spec.dtype)));
    list.append(py::make_tuple(spec.name, py::tuple(py::cast(spec.shape)), dtype, kInit[static_cast<int>(spec.init)],
                               spec.fan_in, spec.supports_main_grad));
  }
  return list;
}

py::list types() {
  static constexpr const char* kParamKinds[] = {"keyword", "positional", "required"};
  py::list list;
  for (const auto& [name, type] : ops::op_types()) {
    py::list fields;
    for (const auto& field : type.fields)
      fields.append(py::make_tuple(field.name, to_python(field.value), kParamKinds[static_cast<int>(field.kind)]));
    list.append(py::make_tuple(name, type.doc, fields, std::const_pointer_cast<ops::BasicOp>(type.sample)));
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
      .def_property_readonly("depends_on_training", &ops::BasicOp::depends_on_training)
      .def_property_readonly("takes_buffers", &ops::BasicOp::takes_buffers)
      .def("is_index", &ops::BasicOp::is_index, py::arg("extra_input"), "Whether an extra input holds split sizes.")
      .def("fields", &fields_of, "Field names and values.")
      .def("params", &params_of, "Parameters as (name, shape, dtype, init, fan_in, supports_main_grad).")
      .def("__repr__", &ops::BasicOp::brief)
      .def_property_readonly("text", &ops::BasicOp::text, "The description with every field, as in the pipeline text.")
      .def(
          "__eq__", [](const ops::BasicOp& a, const ops::BasicOp& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const ops::BasicOp& op) { return std::hash<std::string>{}(op.text()); });
  m.def(
      "make_op",
      [](const std::string& name, const py::dict& keywords) {
        return std::const_pointer_cast<ops::BasicOp>(make_op(name, keywords));
      },
      py::arg("name"), py::arg("fields"), "Creates a registered operation from its fields.");
  m.def("did_you_mean", &did_you_mean, py::arg("name"), py::arg("known"),
        "\" Did you mean 'bias'?\" with the nearest known name; empty if none is near.");
  m.def("op_types", &types, "Registered operations as (name, doc, [(field, default, kind)], sample).");
}

}  // namespace weft::python
