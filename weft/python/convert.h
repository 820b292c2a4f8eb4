#pragma once
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "weft/core/value.h"

namespace weft::python {

/// Python's None, bool, int, float, str, torch.dtype, sequence of int as a value and back. `what` opens the error text.
Value to_value(const std::string& what, py::handle object);
py::object to_python(const Value& value);

/// A tensor argument, or TypeError naming it. Subclasses with their own dispatch (DTensor, FakeTensor …) raise by name.
const at::Tensor& to_tensor(PyObject* object, const char* what);

}  // namespace weft::python
