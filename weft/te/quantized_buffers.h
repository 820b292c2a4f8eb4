#pragma once
#include <array>
#include <vector>

#include "weft/te/quantizer_view.h"

// The buffers of a quantized tensor, wherever they lie: in an object of a tensor class, or in a grouped tensor.

namespace weft::te {

/// The buffers of one copy, on the device of the tensor. Scales of `per_tensor` are shared by both copies.
struct CopyBuffers {
  at::Tensor data, scales, amax;
};

struct QuantizedBuffers {
  Layout layout;
  kernels::Quantization how;
  std::vector<int64_t> sizes;  // logical
  CopyBuffers rowwise, columnwise;
  bool swizzled = false;     // scales in the layout of a GPU's GEMMs
  bool random_signs = true;  // of the Hadamard transform

  int64_t rows() const;  // of the flattened matrix
  int64_t columns() const;
  CopyBuffers& copy(bool is_columnwise) { return is_columnwise ? columnwise : rowwise; }
  const CopyBuffers& copy(bool is_columnwise) const { return is_columnwise ? columnwise : rowwise; }
};

std::vector<int64_t> data_sizes(const QuantizedBuffers& buffers, bool columnwise);
/// The sizes of the scales with their padding.
std::vector<int64_t> scale_sizes(const QuantizedBuffers& buffers, bool columnwise);
int64_t amax_count(const QuantizedBuffers& buffers, bool columnwise);
inline at::ScalarType scale_dtype(Layout layout) {
  return layout == Layout::per_tensor || layout == Layout::block ? at::kFloat : at::kByte;
}

/// The buffers of a tensor with these sizes, without memory, as the quantizer makes them.
QuantizedBuffers describe_buffers(const QuantizerView& quantizer, at::IntArrayRef sizes);
/// Whether a GPU's kernel writes swizzled scales itself, so that tensors without values are marked as swizzled already.
bool swizzles_while_quantizing(const QuantizedBuffers& buffers);
/// The copies that the quantizer makes: {rowwise, columnwise}.
std::array<bool, 2> requested_copies(const QuantizerView& quantizer);
/// Allocates the buffers of a copy that do not exist.
void allocate_missing(QuantizedBuffers& buffers, bool columnwise, const at::TensorOptions& options);
void allocate_missing(QuantizedBuffers& buffers, const QuantizerView& quantizer, const at::TensorOptions& options);

/// Maximum magnitudes that the caller knows: of the matrix, and of its transformed columnwise copy.
struct KnownAmax {
  at::Tensor rowwise, columnwise;
};
/// Quantizes x, of the CPU, into all copies that have data. The ranks of the quantizer's group share their amax.
void fill_buffers(const at::Tensor& x, const QuantizerView& quantizer, const QuantizedBuffers& buffers,
                  c10::Device device, const KnownAmax& known = {});

/// Copies of the buffers as weft reads them, those that exist among the requested ones.
kernels::QuantizedMatrix readable_matrix(const QuantizedBuffers& buffers, at::ScalarType dtype, bool rowwise,
                                         bool columnwise);
/// The values of the rowwise copy, or else of the columnwise one, with the logical sizes.
at::Tensor decode_buffers(const QuantizedBuffers& buffers, at::ScalarType dtype);

/// The scales of a copy in the layout of a GPU's GEMMs: 32 rows of four scales, from each of four groups of 32 rows.
at::Tensor swizzled_scales(const QuantizedBuffers& buffers, bool columnwise);
/// The inverse: the scales of a copy with one row of padded scales after the other.
at::Tensor row_major_scales(const QuantizedBuffers& buffers, bool columnwise);

/// Replaces `amax` by its maximum over the ranks of `group`; None: leaves it.
void reduce_amax(const at::Tensor& amax, const py::object& group, c10::Device device);

}  // namespace weft::te
