#pragma once
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>

namespace weft::kernels {

/// `t` converted to `dtype`; `t` itself if it already has that dtype.
inline at::Tensor as_dtype(const at::Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? t : t.to(dtype);
}
/// `t` in the dtype to compute in: float32 for bfloat16, float16 and float8, otherwise its own.
inline at::Tensor to_opmath(const at::Tensor& t) { return as_dtype(t, at::toOpMathType(t.scalar_type())); }

}  // namespace weft::kernels
