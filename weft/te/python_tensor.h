#pragma once
#include "weft/te/quantized_buffers.h"

// Objects of Transformer Engine's quantized tensor classes: their buffers, and how they are made.

namespace weft::te {

/// The buffers of an object whose layout is not `python`.
QuantizedBuffers read_buffers(py::handle tensor);

/// The buffers of an object that the quantizer is about to fill. The object gets those that the quantizer requests and
/// it lacks, and loses the others. Raises TypeError if its class is not that of the quantizer.
QuantizedBuffers buffers_to_fill(py::handle tensor, const QuantizerView& quantizer);

/// A new object of the quantizer's tensor class.
py::object make_tensor(const QuantizerView& quantizer, const QuantizedBuffers& buffers, at::ScalarType dtype,
                       c10::Device device);

/// Converts the scales of an object to the layout of a GPU's GEMMs, of the copies that are requested and exist.
void swizzle_tensor(py::handle tensor, bool rowwise, bool columnwise);
/// Marks an object's scales as swizzled.
void mark_swizzled(py::handle tensor);

}  // namespace weft::te
