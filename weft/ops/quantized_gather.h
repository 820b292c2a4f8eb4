#pragma once
#include "weft/comm/group.h"
#include "weft/kernels/quantize.h"

namespace weft::ops {

// A matrix whose rows are distributed over ranks, quantized before it is gathered: the ranks exchange codes and scales,
// which are smaller than values. The result has the bytes of the gathered matrix, quantized.

/// Whether copies of the ranks' rows, `rows` each, make up the copy of all rows.
bool copies_concatenate(const kernels::Quantization& quantization, int64_t rows, bool columnwise);

/// The maximum magnitude of all rows, as `kernels::QuantizeArgs::amax`; undefined if `quantization` has none.
at::Tensor reduced_amax(const comm::Group& group, const kernels::Quantization& quantization, const at::Tensor& rows,
                        bool transformed);

/// The copy of all rows, from the `bytes` of each rank's copy: uint8 [ranks, bytes], as all_gather returns them. Its
/// amax is the largest of the ranks. Raises RuntimeError if a scale of the whole matrix differs between the ranks.
kernels::QuantizedMatrix join_copies(const kernels::Quantization& quantization, at::ScalarType dtype, int64_t rows,
                                     int64_t columns, bool columnwise, const at::Tensor& bytes);

/// Adds the columnwise copy to a matrix with one scale, of which it is the transposed rowwise copy.
void add_columnwise(kernels::QuantizedMatrix& matrix);

}  // namespace weft::ops
