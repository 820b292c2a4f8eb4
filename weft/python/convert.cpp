#include "weft/python/convert.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

namespace weft::python {
namespace {

bool is_integer(py::handle object) { return PyIndex_Check(object.ptr()) && !PyBool_Check(object.ptr()); }

/// The value of `__index__`. Raises TypeError or ValueError, naming `what`, if it fails or does not fit.
int64_t integer(const std::string& what, py::handle object) {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
  if (!index) {
    const py::error_already_set error;
    TORCH_CHECK_TYPE(false, what, " is a ", Py_TYPE(object.ptr())->tp_name,
                     ", expected an int. Its __index__ failed: ", std::string(py::str(error.value())), ".");
  }
  int overflow = 0;
  const auto value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  TORCH_CHECK_VALUE(overflow == 0, what, " is ", std::string(py::repr(index)), ", expected an int of 64 bits.");
  return value;
}

std::vector<int64_t> integers(const std::string& what, py::handle object) {
  std::vector<int64_t> list;
  for (const auto item : object) {
    TORCH_CHECK_TYPE(is_integer(item), what, " contains ", std::string(py::repr(item)), ", expected ints.");
    list.push_back(integer(what, item));
  }
  return list;
}

}  // namespace

Value to_value(const std::string& what, py::handle object) {
  PyObject* o = object.ptr();
  if (object.is_none()) return std::monostate{};
  if (PyBool_Check(o)) return o == Py_True;
  if (PyFloat_Check(o)) return PyFloat_AS_DOUBLE(o);
  if (PyUnicode_Check(o)) return object.cast<std::string>();
  if (THPDtype_Check(o)) return std::string(dtype_name(reinterpret_cast<THPDtype*>(o)->scalar_type));
  if (PyIndex_Check(o)) return integer(what, object);
  if (py::isinstance<py::iterable>(object)) return integers(what, object);
  if (PyNumber_Check(o)) return py::float_(py::reinterpret_borrow<py::object>(object)).cast<double>();
  TORCH_CHECK_TYPE(false, what, " is a ", Py_TYPE(o)->tp_name,
                   ", expected None, bool, int, float, str, torch.dtype or a sequence of int.");
}

py::object to_python(const Value& value) {
  return std::visit(
      [](const auto& x) -> py::object {
        if constexpr (std::is_same_v<std::decay_t<decltype(x)>, std::monostate>) {
          return py::none();
        } else {
          return py::cast(x);
        }
      },
      value);
}

py::dict to_python(const std::vector<FieldValue>& fields) {
  py::dict dict;
  for (const auto& field : fields) dict[py::str(field.name)] = to_python(field.value);
  return dict;
}

py::object to_python(const at::Tensor& tensor) {
  return tensor.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)) : py::none();
}

const at::Tensor& to_tensor(PyObject* object, std::string_view owner, std::string_view what) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), owner, ": ", what, " must be a torch.Tensor, got ",
                   Py_TYPE(object)->tp_name, ".");
  const auto& tensor = THPVariable_Unpack(object);
  TORCH_CHECK_NOT_IMPLEMENTED(THPVariable_CheckExact(object) || !tensor.key_set().has(c10::DispatchKey::Python), owner,
                              ": ", what, " is a ", Py_TYPE(object)->tp_name,
                              ", a tensor subclass with Python dispatch; expected a dense tensor with storage.");
  return tensor;
}

}  // namespace weft::python
