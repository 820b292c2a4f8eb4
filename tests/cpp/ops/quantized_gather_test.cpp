#include "weft/ops/quantized_gather.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "weft/quant/quantizer.h"

namespace weft::ops {
namespace {

using kernels::QuantizedCopy;
using kernels::QuantizedMatrix;
using quant::Quantizer;
using quant::Scaling;

constexpr int64_t kRanks = 3, kColumns = 160;

std::vector<Quantizer> quantizers() {
  return {{.scaling = Scaling::current},
          {.scaling = Scaling::current, .format = Format::e5m2, .power_of_2_scales = true},
          {.scaling = Scaling::block},
          {.scaling = Scaling::block, .two_dimensional = true},
          {.scaling = Scaling::mxfp8},
          {.scaling = Scaling::mxfp8, .two_dimensional = true},
          {.scaling = Scaling::nvfp4, .format = Format::e2m1},
          {.scaling = Scaling::nvfp4, .format = Format::e2m1, .two_dimensional = true},
          {.scaling = Scaling::nvfp4, .format = Format::e2m1, .random_hadamard_transform = true},
          {.scaling = Scaling::nvfp4, .format = Format::e2m1, .row_scaled = true}};
}

const QuantizedCopy& copy_of(const QuantizedMatrix& matrix, bool columnwise) {
  return columnwise ? matrix.columnwise : matrix.rowwise;
}

/// Rows of all ranks, with maxima that differ from rank to rank.
at::Tensor all_rows(int64_t rows) {
  at::manual_seed(5);
  const auto x = at::randn({kRanks * rows, kColumns}).mul_(at::linspace(0.1, 8, kRanks * rows).unsqueeze(1));
  return x.to(at::kBFloat16);
}

DistributedCopy description(const kernels::Quantization& how, int64_t rows, bool columnwise, uint64_t recipe = 7) {
  return {.quantization = how,
          .dtype = at::kBFloat16,
          .rows = rows,
          .columns = kColumns,
          .leading_size = rows,
          .recipe = recipe,
          .columnwise = columnwise};
}

/// As gather_copies returns the bytes of ranks with `rows` rows each and recipe 7.
at::Tensor with_headers(const std::vector<at::Tensor>& bytes, int64_t rows, bool columnwise = false) {
  const auto dtype = static_cast<int64_t>(at::kBFloat16);
  const auto header =
      at::tensor({rows, kColumns, rows, int64_t{7}, dtype, int64_t{columnwise}, int64_t{0}, int64_t{0}});
  std::vector<at::Tensor> list;
  for (const auto& part : bytes) list.push_back(at::cat({header.view(at::kByte), part}));
  return at::stack(list);
}

/// Quantizes the rows of each rank and joins the copies.
QuantizedMatrix joined(const Quantizer& quantizer, const at::Tensor& x, bool columnwise) {
  const auto how = quantizer.quantization();
  const auto parts = x.chunk(kRanks);
  std::vector<at::Tensor> bytes;
  for (const auto& part : parts) {
    kernels::QuantizeArgs args{.rowwise = !columnwise, .columnwise = columnwise};
    const bool transforms = columnwise && how.hadamard;
    if (how.has_amax() && !how.row_scaled)
      (transforms ? args.transformed_amax : args.amax) = kernels::quantization_amax(x, how, transforms);
    bytes.push_back(copy_of(kernels::quantize(part, how, args), columnwise).bytes);
  }
  return join_copies(description(how, parts[0].size(0), columnwise), with_headers(bytes, parts[0].size(0), columnwise));
}

void expect_equal(const QuantizedCopy& got, const QuantizedCopy& expected) {
  EXPECT_TRUE(got.data.equal(expected.data));
  EXPECT_TRUE(got.scales.equal(expected.scales));
  ASSERT_EQ(got.amax.defined(), expected.amax.defined());
  if (got.amax.defined()) {
    EXPECT_TRUE(got.amax.equal(expected.amax));
  }
}

TEST(QuantizedGather, JoinedCopiesAreThoseOfAllRows) {
  for (const int64_t rows : {128, 32, 16, 6})
    for (const auto& quantizer : quantizers())
      for (const bool columnwise : {false, true}) {
        const auto how = quantizer.quantization();
        if (!copies_concatenate(how, rows, columnwise) || (columnwise && how.row_scaled)) continue;
        if (columnwise && how.hadamard && rows % 16 != 0) continue;
        SCOPED_TRACE(testing::Message() << "rows " << rows << ", block " << how.block << ", 2-D " << how.two_dimensional
                                        << ", columnwise " << columnwise);
        const auto x = all_rows(rows);
        const auto whole = kernels::quantize(x, how, {.rowwise = !columnwise, .columnwise = columnwise});
        expect_equal(copy_of(joined(quantizer, x, columnwise), columnwise), copy_of(whole, columnwise));
      }
}

TEST(QuantizedGather, OnlyBlocksOfWholeRanksConcatenate) {
  const auto mxfp8 = Quantizer{.scaling = Scaling::mxfp8}.quantization();
  const auto square = Quantizer{.scaling = Scaling::block, .two_dimensional = true}.quantization();
  const auto current = Quantizer{.scaling = Scaling::current}.quantization();
  EXPECT_TRUE(copies_concatenate(mxfp8, 7, false));
  EXPECT_FALSE(copies_concatenate(mxfp8, 40, true));
  EXPECT_TRUE(copies_concatenate(mxfp8, 64, true));
  EXPECT_FALSE(copies_concatenate(square, 64, false));
  EXPECT_TRUE(copies_concatenate(square, 256, false));
  EXPECT_TRUE(copies_concatenate(current, 7, true));
}

TEST(QuantizedGather, ColumnwiseCopyIsTheTransposedOne) {
  const auto how = Quantizer{.scaling = Scaling::current}.quantization();
  const auto x = all_rows(10);
  auto matrix = kernels::quantize(x, how, {});
  add_columnwise(matrix);
  expect_equal(matrix.columnwise, kernels::quantize(x, how, {.columnwise = true}).columnwise);
}

TEST(QuantizedGather, DifferentScalesOfRanksRaise) {
  const auto how = Quantizer{.scaling = Scaling::delayed}.quantization();
  const auto x = all_rows(8);
  std::vector<at::Tensor> bytes;
  for (int64_t rank = 0; rank < kRanks; ++rank)
    bytes.push_back(
        kernels::quantize(x.chunk(kRanks)[rank], how, {.scale = at::full({1}, rank == 2 ? 2. : 1.)}).rowwise.bytes);
  EXPECT_THROW(join_copies(description(how, 8, false), with_headers(bytes, 8)), c10::ValueError);
}

TEST(QuantizedGather, DifferentRowsOrRecipesOfRanksRaise) {
  const auto how = Quantizer{.scaling = Scaling::mxfp8}.quantization();
  const auto x = all_rows(4);
  const auto bytes = kernels::quantize(x.slice(0, 0, 4), how, {}).rowwise.bytes;
  EXPECT_NO_THROW(join_copies(description(how, 4, false), with_headers({bytes, bytes}, 4)));
  EXPECT_THROW(join_copies(description(how, 4, false), with_headers({bytes, bytes}, 3)), c10::ValueError);
  EXPECT_THROW(join_copies(description(how, 4, false, 8), with_headers({bytes, bytes}, 4)), c10::ValueError);
  auto other = description(how, 4, false);
  other.dtype = at::kFloat;
  EXPECT_THROW(join_copies(other, with_headers({bytes, bytes}, 4)), c10::ValueError);
}

}  // namespace
}  // namespace weft::ops
