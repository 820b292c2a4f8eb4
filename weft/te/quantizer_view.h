#pragma once
#include "weft/kernels/quantize.h"
#include "weft/te/bind.h"

// Transformer Engine's quantizers, which are Python objects, as values.

namespace weft::te {

/// The quantizer classes. `python`: classes that quantize in Python, such as hybrid, identity and custom quantizers.
enum class QuantizerKind { none, delayed, current, block, mxfp8, nvfp4, python };
QuantizerKind kind_of_quantizer(py::handle quantizer);

/// The layouts of the buffers of the tensor classes. `python`: classes whose values only Python can read.
enum class Layout { per_tensor, block, mxfp8, nvfp4, python };
/// Whether the object is of a class that derives from Transformer Engine's QuantizedTensorStorage.
bool is_quantized_instance(py::handle object);
/// Raises TypeError unless `tensor` is an object of a quantized tensor class.
Layout layout_of_tensor(py::handle tensor);

struct [[gnu::visibility("hidden")]] QuantizerView {
  py::object object;
  QuantizerKind kind = QuantizerKind::none;
  Layout layout = Layout::python;
  kernels::Quantization how;
  bool rowwise = true, columnwise = false;
  bool internal = false;               // makes objects of the storage class, which is no tensor
  bool optimize_for_gemm = false;      // scales in the layout of a GPU's GEMMs
  bool random_signs = true;            // of the Hadamard transform
  at::Tensor scale, amax;              // delayed: the scale to use, and the maximum magnitude to raise
  py::object amax_group = py::none();  // the process group whose ranks share one amax; None: this rank only
};
QuantizerView view_quantizer(py::handle quantizer);

/// Whether the simulated GPU multiplies FP8 matrices in every layout: then tensors with one scale have no transpose.
bool gpu_needs_no_transpose();

/// The class that the quantizer makes objects of.
py::handle tensor_class(const QuantizerView& quantizer);
/// The class of grouped tensors, or of their storage.
py::object grouped_tensor_class(bool internal);

/// The attribute of a Python object; undefined if it is None.
at::Tensor optional_tensor(py::handle object, const char* attribute);

}  // namespace weft::te
