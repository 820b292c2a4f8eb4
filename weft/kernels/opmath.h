#pragma once
#include <ATen/core/Tensor.h>

namespace weft::kernels {

/// The dtype to compute in: float32 for bfloat16, float16 and float8 inputs, otherwise `dtype`.
inline at::ScalarType opmath_dtype(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}
inline at::Tensor to_opmath(const at::Tensor& t) {
  return at::isReducedFloatingType(t.scalar_type()) ? t.to(at::kFloat) : t;
}
/// `t` converted to `dtype`; `t` itself if it already has that dtype.
inline at::Tensor as_dtype(const at::Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? t : t.to(dtype);
}

}  // namespace weft::kernels
