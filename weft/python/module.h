#pragma once
#include <torch/csrc/utils/pybind.h>

namespace weft::python {

void bind_ops(py::module_& m);
void bind_runner(py::module_& m);
void bind_custom(py::module_& m);
void bind_explain(py::module_& m);
void bind_functional(py::module_& m);
void bind_wgrad(py::module_& m);
void bind_packing(py::module_& m);
void bind_quantization(py::module_& m);
void bind_recipes(py::module_& m);
/// Lets Ctrl-C interrupt waits between ranks.
void bind_interrupt();

}  // namespace weft::python
