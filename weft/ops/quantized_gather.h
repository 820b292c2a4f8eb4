#pragma once
#include "weft/comm/group.h"
#include "weft/kernels/quantize.h"

namespace weft::comm {
class Transport;
}
namespace weft::kernels {
struct Epilogue;
struct GemmResult;
struct QuantizedOperand;
}  // namespace weft::kernels

namespace weft::ops {

// A matrix whose rows are distributed over ranks, quantized before it is gathered: the ranks exchange codes and scales,
// which are smaller than values. The result has the bytes of the gathered matrix, quantized.

/// Whether copies of the ranks' rows, `rows` each, make up the copy of all rows.
bool copies_concatenate(const kernels::Quantization& quantization, int64_t rows, bool columnwise);

/// The maximum magnitude of all rows, as `kernels::QuantizeArgs::amax`; undefined if `quantization` has none. Sent over
/// `transport`, if not null.
at::Tensor reduced_amax(const comm::Group& group, comm::Transport* transport, const kernels::Quantization& quantization,
                        const at::Tensor& rows, bool transformed);

/// One copy of a rank's rows. It is the same on all ranks, or joining the copies raises.
struct DistributedCopy {
  kernels::Quantization quantization;
  at::ScalarType dtype;
  int64_t rows, columns;
  int64_t leading_size;  // dimension 0 of the tensor that has these rows
  uint64_t recipe;       // recipe_hash
  bool columnwise;
};

/// Gathers the bytes of the copies, each with a description: uint8 [ranks, bytes].
comm::Work gather_copies(const comm::Group& group, const DistributedCopy& copy, const at::Tensor& bytes);
at::Tensor gather_copies(comm::Transport& transport, const DistributedCopy& copy, const at::Tensor& bytes);

/// The copy of all rows, from what `gather_copies` returned. Its amax is the largest of the ranks. Raises ValueError if
/// the ranks have different rows or recipes, or different scales of the whole matrix.
kernels::QuantizedMatrix join_copies(const DistributedCopy& copy, const at::Tensor& gathered);

/// epilogue(X Wᵀ) of the rows X of all ranks, of which `rows` are this rank's; those of other ranks are multiplied as
/// they arrive. For quantizations that `multiplies_in_chunks`. `amax`, if not null, receives the largest amax of the
/// ranks. Raises as `join_copies`.
kernels::GemmResult overlapped_gemm(comm::Transport& transport, const DistributedCopy& copy,
                                    const kernels::QuantizedMatrix& rows, const kernels::QuantizedOperand& w,
                                    const kernels::Epilogue& epilogue, at::Tensor* amax);

/// Adds the columnwise copy to a matrix with one scale, of which it is the transposed rowwise copy.
void add_columnwise(kernels::QuantizedMatrix& matrix);

}  // namespace weft::ops
