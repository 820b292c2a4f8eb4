#pragma once
#include <c10/core/ScalarType.h>

#include "weft/te/bind.h"

// Transformer Engine's data types. Python passes them as the enum `transformer_engine_torch.DType`, as an integer, or
// as a member of the IntEnum `transformer_engine.pytorch.DType`; functions that take a `DType` accept all three.

namespace weft::te {

/// The values of the public header transformer_engine.h.
enum class DType {
  byte = 0,
  int16 = 1,
  int32 = 2,
  int64 = 3,
  float32 = 4,
  float16 = 5,
  bfloat16 = 6,
  float8_e4m3 = 7,
  float8_e5m2 = 8,
  float8_e8m0 = 9,
  float4_e2m1 = 10,
};
constexpr int kDTypes = 11;

/// The type of a tensor of `dtype`. Raises TypeError for float4_e2m1, whose values are stored two per byte.
at::ScalarType scalar_type(DType dtype);

/// The data type of a plain tensor; bool is `byte`. Raises TypeError for types that Transformer Engine does not have.
DType dtype_of(at::ScalarType type);

/// `dtype` as a member of `transformer_engine.pytorch.DType`, as the attributes of its classes hold it.
py::object python_dtype(DType dtype);

}  // namespace weft::te

/// Visible wherever a `DType` is converted, so that every file instantiates the same caster.
template <>
struct pybind11::detail::type_caster<weft::te::DType> {
  PYBIND11_TYPE_CASTER(weft::te::DType, const_name("DType"));

  bool load(handle source, bool convert) {
    if (PyLong_Check(source.ptr())) {
      const long number = PyLong_AsLong(source.ptr());
      PyErr_Clear();
      value = static_cast<weft::te::DType>(number);
      return number >= 0 && number < weft::te::kDTypes;
    }
    type_caster_base<weft::te::DType> member;
    if (!member.load(source, convert)) return false;
    value = *static_cast<weft::te::DType*>(member);
    return true;
  }
  static handle cast(weft::te::DType dtype, return_value_policy policy, handle parent) {
    return type_caster_base<weft::te::DType>::cast(dtype, policy, parent);
  }
};
