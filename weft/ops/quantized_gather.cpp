#include "weft/ops/quantized_gather.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

#include "weft/overlap/schedules.h"

namespace weft::ops {

using kernels::CopySizes;
using kernels::Quantization;
using kernels::QuantizedCopy;
using kernels::QuantizedMatrix;

namespace {

/// The description that precedes a rank's bytes.
struct Header {
  int64_t rows, columns, leading_size, recipe, dtype, columnwise, unused[2] = {};

  static Header of(const DistributedCopy& copy) {
    return {copy.rows,
            copy.columns,
            copy.leading_size,
            static_cast<int64_t>(copy.recipe),
            static_cast<int>(copy.dtype),
            copy.columnwise};
  }
  bool operator==(const Header&) const = default;
};
constexpr int64_t kHeaderBytes = sizeof(Header);
static_assert(kHeaderBytes == 64, "copies are aligned to 64 bytes");

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

void check_header(const DistributedCopy& copy, const at::Tensor& bytes, int64_t rank) {
  Header found{};
  const auto header = bytes.narrow(0, 0, kHeaderBytes).cpu();
  std::memcpy(&found, header.const_data_ptr(), sizeof found);
  const auto expected = Header::of(copy);
  TORCH_CHECK_VALUE(
      found == expected, "this rank gathers ", copy.rows, " x ", copy.columns, " values, dimension 0 of size ",
      copy.leading_size, ", rank ", rank, " gathers ", found.rows, " x ", found.columns, ", dimension 0 of size ",
      found.leading_size, found.recipe == expected.recipe ? "" : ", with another recipe",
      found.dtype == expected.dtype ? "" : ", of another dtype",
      ". Call the linear with equal shapes, dtypes and recipes on all ranks of its tensor-parallel group.");
}

/// The header and the bytes of a copy: uint8 [n].
at::Tensor with_header(const DistributedCopy& copy, const at::Tensor& bytes) {
  auto out = at::empty({kHeaderBytes + bytes.numel()}, bytes.options());
  auto header = Header::of(copy);
  out.narrow(0, 0, kHeaderBytes).copy_(at::from_blob(&header, {kHeaderBytes}, at::kByte));
  out.slice(0, kHeaderBytes).copy_(bytes);
  return out;
}

/// For matrices with one scale.
void check_scale(const QuantizedCopy& expected, int64_t expected_rank, const QuantizedCopy& found, int64_t rank) {
  TORCH_CHECK_VALUE(found.scales.equal(expected.scales), "ranks ", expected_rank, " and ", rank,
                    " scale their rows by ", 1 / expected.scales.item<float>(), " and ", 1 / found.scales.item<float>(),
                    ". Load the same state of delayed scaling on all ranks of a tensor-parallel group.");
}

/// Copies the scales and the maximum of rank `rank`.
void join_scales(const Quantization& quantization, QuantizedCopy& to, const QuantizedCopy& from, int64_t rank,
                 int64_t dim) {
  if (quantization.block > 0) {
    copy_part(to.scales, from.scales, rank, dim);
  } else if (rank == 0) {
    to.scales.copy_(from.scales);
  } else {
    check_scale(to, 0, from, rank);
  }
  if (!quantization.has_amax()) return;
  if (quantization.row_scaled) return copy_part(to.amax, from.amax, rank, 0);
  to.amax.copy_(rank == 0 ? from.amax : to.amax.maximum(from.amax));
}

}  // namespace

bool copies_concatenate(const Quantization& quantization, int64_t rows, bool columnwise) {
  const bool blocks_of_rows = quantization.block > 0 && (columnwise || quantization.two_dimensional);
  return !blocks_of_rows || rows % quantization.block == 0;
}

at::Tensor reduced_amax(const comm::Group& group, comm::Transport* transport, const Quantization& quantization,
                        const at::Tensor& rows, bool transformed) {
  if (!quantization.has_amax()) return {};
  auto local = kernels::quantization_amax(rows, quantization, transformed);
  if (quantization.row_scaled) return local;
  const auto all =
      transport ? overlap::OverlappedAllGather(*transport, local.view({1, 1})).wait() : group.all_gather(local).wait();
  return all.max().view({1});
}

comm::Work gather_copies(const comm::Group& group, const DistributedCopy& copy, const at::Tensor& bytes) {
  return group.all_gather(with_header(copy, bytes).unsqueeze(0));
}

at::Tensor gather_copies(comm::Transport& transport, const DistributedCopy& copy, const at::Tensor& bytes) {
  auto all = overlap::OverlappedAllGather(transport, with_header(copy, bytes).view({-1, kHeaderBytes})).wait();
  return all.view({transport.size(), -1});
}

QuantizedMatrix join_copies(const DistributedCopy& copy, const at::Tensor& gathered) {
  const auto& how = copy.quantization;
  const auto ranks = gathered.size(0);
  auto joined = empty_matrix(how, copy.dtype, copy.rows * ranks, copy.columns, copy.columnwise, gathered.options());
  auto& to = copy_of(joined, copy.columnwise);
  const int64_t dim = copy.columnwise && !how.columns_in_place() ? 1 : 0;  // of the codes, along the rows
  for (int64_t rank = 0; rank < ranks; ++rank) {
    check_header(copy, gathered[rank], rank);
    const auto bytes = gathered[rank].slice(0, kHeaderBytes);
    auto part = kernels::matrix_of_copy(how, copy.dtype, copy.rows, copy.columns, copy.columnwise, bytes);
    const auto& from = copy_of(part, copy.columnwise);
    copy_part(to.data, from.data, rank, dim);
    join_scales(how, to, from, rank, dim);
  }
  return joined;
}

kernels::GemmResult overlapped_gemm(comm::Transport& transport, const DistributedCopy& copy,
                                    const QuantizedMatrix& rows, const kernels::QuantizedOperand& w,
                                    const kernels::Epilogue& epilogue, at::Tensor* amax) {
  const overlap::QuantizedBlock block{with_header(copy, rows.rowwise.bytes), kHeaderBytes, rows};
  if (amax) *amax = rows.rowwise.amax.clone();
  return overlap::all_gather_gemm(transport, block, w, epilogue,
                                  [&](int rank, const at::Tensor& header, const QuantizedMatrix& theirs) {
                                    check_header(copy, header, rank);
                                    if (copy.quantization.block == 0)
                                      check_scale(rows.rowwise, transport.rank(), theirs.rowwise, rank);
                                    if (amax) amax->copy_(amax->maximum(theirs.rowwise.amax));
                                  });
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
