#pragma once
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "weft/core/fields.h"
#include "weft/core/value.h"

namespace weft::python {

/// Converts None, bool, int, float, str, torch.dtype or a sequence of int to a Value, and back. `what` prefixes errors.
Value to_value(const std::string& what, py::handle object);
py::object to_python(const Value& value);
/// Fields as a dictionary of names and values.
py::dict to_python(const std::vector<FieldValue>& fields);
/// A tensor; None if it is undefined.
py::object to_python(const at::Tensor& tensor);

/// Unpacks a tensor argument of `owner`. Raises TypeError for other objects and NotImplementedError for tensor
/// subclasses with Python dispatch (DTensor, FakeTensor …).
const at::Tensor& to_tensor(PyObject* object, std::string_view owner, std::string_view what);

}  // namespace weft::python
