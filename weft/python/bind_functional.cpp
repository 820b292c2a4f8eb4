#include "weft/fuser/functional.h"
#include "weft/fuser/infer.h"
#include "weft/python/module.h"

namespace weft::python {
namespace {

ops::Spec spec_from(const py::tuple& pair) {
  ops::Spec spec;
  for (const auto size : pair[0]) spec.sizes.push_back(size.cast<c10::SymInt>());
  spec.dtype = pair[1].cast<at::ScalarType>();
  return spec;
}

std::vector<ops::Spec> specs_from(const py::list& list) {
  std::vector<ops::Spec> specs;
  for (const auto item : list) specs.push_back(spec_from(item.cast<py::tuple>()));
  return specs;
}

py::tuple to_python(const ops::Spec& spec) {
  py::list sizes;
  for (const auto& size : spec.sizes) sizes.append(py::cast(size));
  return py::make_tuple(sizes, py::cast(spec.dtype));
}

/// Specs of the outputs and of the saved slots as the dispatcher op returns them; None for a slot that is empty there.
py::tuple infer(const std::string& text, const py::tuple& x, const py::list& params, const py::list& extras) {
  const auto program = fuser::program(text);
  const auto shapes =
      fuser::infer(*program.pipeline, *program.plan, spec_from(x), specs_from(params), specs_from(extras));
  py::list outputs, saved;
  for (const auto& spec : shapes.outputs) outputs.append(to_python(spec));
  for (const auto& slot : shapes.saved)
    saved.append(slot.spec && slot.keeps_value_of != -1 ? py::object(to_python(*slot.spec)) : py::none());
  return py::make_tuple(outputs, saved);
}

}  // namespace

void bind_functional(py::module_& m) {
  m.def(
      "normalize_text", [](const std::string& text) { return fuser::Pipeline::parse(text).text(); }, py::arg("text"),
      "The text of a pipeline, read and written again.");
  m.def("infer", &infer, py::arg("text"), py::arg("x"), py::arg("params"), py::arg("extras"),
        "Sizes and dtypes of what a described call returns; tensors are (sizes, dtype).");
}

}  // namespace weft::python
