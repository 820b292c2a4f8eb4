#pragma once
#include "weft/kernels/quantize.h"

// The `ref` tier of quantization, in ATen calls. Not installed.

namespace weft::kernels {
/// The largest finite value of float32, bfloat16 or float16.
float max_of(at::ScalarType dtype);
CopySizes<int64_t> sizes_of(const QuantizedMatrix& q, bool columnwise);
/// An uninitialized copy.
QuantizedCopy allocate_copy(const QuantizedMatrix& q, bool columnwise, const at::TensorOptions& options);
/// A copy that is about to be read. Raises ValueError if the matrix has none, or if its memory was resized.
const QuantizedCopy& require_copy(const char* who, const QuantizedMatrix& q, bool columnwise);
}  // namespace weft::kernels

namespace weft::kernels::ref {

/// Fills the copies of `q`, whose amax is known.
void quantize(const at::Tensor& x, const QuantizeArgs& args, const QuantizedMatrix& q);
at::Tensor quantization_amax(const at::Tensor& x, bool of_rows);
at::Tensor hadamard_transform(const at::Tensor& x);
/// [K, M], transformed along M, back to the values before the transform.
at::Tensor inverse_hadamard_transform(const at::Tensor& y);
/// float32 values of a copy, in the layout of its data.
at::Tensor decode_copy(const QuantizedMatrix& q, bool columnwise, Decoding decoding);

}  // namespace weft::kernels::ref
