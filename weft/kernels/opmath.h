#pragma once
#include <ATen/core/Tensor.h>

namespace weft::kernels {

/// The dtype in which values of `dtype` are computed: float32 for low precision, else its own.
inline at::ScalarType opmath_dtype(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}
inline at::Tensor to_opmath(const at::Tensor& t) {
  return at::isReducedFloatingType(t.scalar_type()) ? t.to(at::kFloat) : t;
}
/// `t` in `dtype`: `t` itself if it has it.
inline at::Tensor as_dtype(const at::Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? t : t.to(dtype);
}

}  // namespace weft::kernels
