#pragma once
#include <optional>
#include <vector>

#include "weft/kernels/quantize.h"
#include "weft/te/bind.h"

// Transformer Engine's quantized tensor classes and quantizers, which are Python objects, as weft's values.

namespace weft::te {

/// Whether `tensor` is an object of one of Transformer Engine's quantized tensor classes, those written in Python alone
/// (hybrid, identity) included.
bool is_quantized(py::handle tensor);

/// The device of a torch.Tensor or of the buffers of a quantized tensor.
c10::Device device_of(py::handle tensor);

/// The logical sizes of a torch.Tensor or of a quantized tensor.
std::vector<int64_t> sizes_of(py::handle tensor);

/// Quantizes `x`, a tensor of the CPU of any number of dimensions, by a quantizer of Transformer Engine. Returns an
/// object of its tensor class with buffers on `device`, or `out` itself with its buffers filled. A quantizer of None:
/// returns x as a tensor on `device`, or copies it into `out`. Nothing is written where `noop`, one float32, is 1.
py::object quantize(const at::Tensor& x, py::handle quantizer, c10::Device device, py::handle out = py::none(),
                    const at::Tensor& noop = {});

/// Which of the two copies of a quantized matrix.
enum class Copy { rowwise, columnwise };

/// An operand of a GEMM as the CPU sees it: a plain matrix, or one of the copies of a quantized one as a view of the
/// buffers of the Python object.
struct Operand {
  at::Tensor plain;                                   // [rows, columns] if not quantized
  std::optional<kernels::QuantizedMatrix> quantized;  // its flattened form [rows, columns], else
  Copy copy = Copy::rowwise;
};

/// The operand of a GEMM that reduces over the last dimension of `tensor` (rowwise) or over the others (columnwise).
/// The matrix of a tensor with one scale may have the rowwise copy only, which GEMMs read in both directions. Tensors
/// of classes that only Python can read are dequantized. Raises ValueError if the tensor lacks the copy.
Operand read_operand(py::handle tensor, Copy copy);

/// The matrix of a quantized tensor in memory of its own, in weft's layout (QuantizedCopy::bytes), on its device. A
/// tensor with one scale gets both copies. Raises ValueError unless it was quantized as `how` says.
kernels::QuantizedMatrix own_matrix(py::handle tensor, const kernels::Quantization& how);

/// The values of a torch.Tensor or a quantized tensor as a tensor of the CPU with `dtype`.
at::Tensor dequantized(py::handle tensor, at::ScalarType dtype);

/// The dtype of a torch.Tensor, or of a quantized tensor before quantization.
at::ScalarType dtype_of_tensor(py::handle tensor);

}  // namespace weft::te
