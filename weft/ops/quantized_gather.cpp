#include "weft/ops/quantized_gather.h"

#include <ATen/ops/empty.h>

namespace weft::ops {

using kernels::CopySizes;
using kernels::Quantization;
using kernels::QuantizedCopy;
using kernels::QuantizedMatrix;

namespace {

QuantizedCopy& copy_of(QuantizedMatrix& matrix, bool columnwise) {
  return columnwise ? matrix.columnwise : matrix.rowwise;
}

/// A matrix with one copy that is not initialized.
QuantizedMatrix empty_matrix(const Quantization& quantization, at::ScalarType dtype, int64_t rows, int64_t columns,
                             bool columnwise, const at::TensorOptions& options) {
  const CopySizes<int64_t> sizes(quantization, rows, columns, columnwise);
  return kernels::matrix_of_copy(quantization, dtype, rows, columns, columnwise, at::empty({sizes.bytes()}, options));
}

/// Copies part `index` of equal parts along dimension `dim`.
void copy_part(const at::Tensor& to, const at::Tensor& part, int64_t index, int64_t dim) {
  const auto size = part.size(dim);
  to.narrow(dim, index * size, size).copy_(part);
}

}  // namespace

bool copies_concatenate(const Quantization& quantization, int64_t rows, bool columnwise) {
  const bool blocks_of_rows = quantization.block > 0 && (columnwise || quantization.two_dimensional);
  return !blocks_of_rows || rows % quantization.block == 0;
}

at::Tensor reduced_amax(const comm::Group& group, const Quantization& quantization, const at::Tensor& rows,
                        bool transformed) {
  if (!quantization.has_amax()) return {};
  const auto local = kernels::quantization_amax(rows, quantization, transformed);
  return quantization.row_scaled ? local : group.all_gather(local).wait().max().view({1});
}

QuantizedMatrix join_copies(const Quantization& quantization, at::ScalarType dtype, int64_t rows, int64_t columns,
                            bool columnwise, const at::Tensor& bytes) {
  const auto ranks = bytes.size(0);
  auto joined = empty_matrix(quantization, dtype, rows * ranks, columns, columnwise, bytes.options());
  auto& to = copy_of(joined, columnwise);
  const int64_t dim = columnwise && !quantization.columns_in_place() ? 1 : 0;  // of the codes, along the rows
  for (int64_t rank = 0; rank < ranks; ++rank) {
    auto part = kernels::matrix_of_copy(quantization, dtype, rows, columns, columnwise, bytes[rank]);
    const auto& from = copy_of(part, columnwise);
    copy_part(to.data, from.data, rank, dim);
    if (quantization.block > 0) {
      copy_part(to.scales, from.scales, rank, dim);
    } else if (rank == 0) {
      to.scales.copy_(from.scales);
    } else {
      TORCH_CHECK(from.scales.equal(to.scales), "ranks 0 and ", rank, " scale their rows by ",
                  1 / to.scales.item<float>(), " and ", 1 / from.scales.item<float>(),
                  ". Load the same state of delayed scaling on all ranks of a tensor-parallel group.");
    }
    if (!quantization.has_amax()) continue;
    if (quantization.row_scaled) {
      copy_part(to.amax, from.amax, rank, 0);
    } else {
      to.amax.copy_(rank == 0 ? from.amax : to.amax.maximum(from.amax));
    }
  }
  return joined;
}

void add_columnwise(QuantizedMatrix& matrix) {
  auto made = empty_matrix(matrix.quantization, matrix.dtype, matrix.rows, matrix.columns, true,
                           matrix.rowwise.bytes.options());
  made.columnwise.data.copy_(matrix.rowwise.data.t());
  made.columnwise.scales.copy_(matrix.rowwise.scales);
  made.columnwise.amax.copy_(matrix.rowwise.amax);
  matrix.columnwise = made.columnwise;
}

}  // namespace weft::ops
