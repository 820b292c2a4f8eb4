#pragma once
#include <ATen/core/Tensor.h>

#include "weft/core/formats.h"
#include "weft/kernels/tier.h"

namespace weft::kernels {

/// Which of two E4M3 scales a block with E2M1 values takes: always that which maps its largest value to 6, or the one
/// of 4 and 6 with the smaller error, absolute or squared.
enum class FourOverSix { none, absolute, squared };

/// How the values of a matrix are scaled and rounded. Blocks of `block` values along the last dimension share a scale;
/// blocks of block × block values if `two_dimensional`; all values of the matrix if `block` is 0.
struct Quantization {
  Format format = Format::e4m3;
  ScaleFormat scale_format = ScaleFormat::float32;
  int64_t block = 0;
  bool two_dimensional = false;
  bool power_of_two = false;  // float32 scales
  float epsilon = 0;          // float32 scales: the smallest amax
  // E4M3 scales:
  float scale_bound = 448;  // the largest one
  bool row_scaled = false;  // one amax per row instead of one for all of the matrix
  bool hadamard = false;    // transforms the columnwise copy
  bool stochastic_rounding = false;
  FourOverSix four_over_six = FourOverSix::none;

  bool operator==(const Quantization&) const = default;
  /// Whether copies contain the maximum magnitude of the matrix, or of each row.
  bool has_amax() const { return block == 0 || scale_format == ScaleFormat::e4m3; }
  /// Whether the columnwise copy is stored as the matrix is, not transposed.
  bool columns_in_place() const { return scale_format == ScaleFormat::e8m0; }
};

/// The random numbers of stochastic rounding: Philox4x32-10 with this key and the upper half of the counter, whose
/// highest bit is that of the columnwise copy; the lower half is the position of a value.
struct RandomStream {
  uint64_t seed = 0, offset = 0;  // offset: below 2^63
};

/// One copy of a quantized matrix [M, K]: with blocks along K (rowwise) or along M (columnwise).
struct QuantizedCopy {
  at::Tensor bytes;  // uint8 [CopySizes::bytes()]: all of the copy; the others are views of it. Undefined: they are not
  at::Tensor data;   // uint8 codes: [M, K], columnwise [K, M]; with two E2M1 codes per byte. E8M0 columnwise: [M, K]
  at::Tensor scales;  // one per block, in the layout of data. float32 scales: their inverses; else uint8 codes
  at::Tensor amax;    // float32: of the matrix, or of each row; undefined with blocks of float32 or E8M0 scales

  bool defined() const { return data.defined(); }
};

/// The sizes of a copy. Int: int64_t, or c10::SymInt for matrices of unknown sizes.
template <class Int>
struct CopySizes {
  Int rows, columns;                               // of the codes
  int64_t block_rows = 1, block_columns = 1;       // of the values that share a scale; 0: all
  Int row_bytes, scale_rows, scale_columns, amax;  // bytes per row of codes; scales; values of amax
  int64_t scale_bytes = 4;                         // of one scale

  CopySizes(const Quantization& how, const Int& matrix_rows, const Int& matrix_columns, bool columnwise);
  // Codes are last, so that those that have arrived can be decoded while others are on their way. amax is first.
  Int scales_offset() const { return round_up(amax * 4); }
  Int data_offset() const { return round_up(scales_offset() + scale_rows * scale_columns * scale_bytes); }
  Int bytes() const { return round_up(data_offset() + rows * row_bytes); }

 private:
  static Int ceil_div(const Int& a, int64_t b) { return (a + (b - 1)) / b; }
  static Int round_up(const Int& a) { return ceil_div(a, 64) * 64; }
};

struct QuantizedMatrix {
  Quantization quantization;
  at::ScalarType dtype;  // before quantization
  int64_t rows, columns;
  QuantizedCopy rowwise = {}, columnwise = {};  // undefined copies were not requested
};

/// What to compute, and what the caller knows already.
struct QuantizeArgs {
  bool rowwise = true, columnwise = false;
  at::Tensor scale = {};  // float32, one element: used instead of the one that the values require (block 0)
  /// float32, for block 0 and E4M3 scales: `quantization_amax`, e.g. reduced over ranks. Undefined: computed here.
  at::Tensor amax = {}, transformed_amax = {};
  RandomStream random = {};
};

/// The matrix whose copy consists of `bytes`. Raises ValueError if their number does not fit.
QuantizedMatrix matrix_of_copy(const Quantization& quantization, at::ScalarType dtype, int64_t rows, int64_t columns,
                               bool columnwise, const at::Tensor& bytes);

/// Raises ValueError for options that exclude each other.
void check_options(const Quantization& quantization);

/// Raises unless the columnwise copy of x can be transformed: bfloat16, and a multiple of 16 rows.
void check_hadamard(const at::Tensor& x);

/// Quantizes x [M, K], of float32, bfloat16 or float16. The bytes are the same in every tier and for any number of
/// threads.
QuantizedMatrix quantize(const at::Tensor& x, const Quantization& quantization, const QuantizeArgs& args);

/// The same into the copies of `q`, which has the sizes of x. Data is contiguous; rows of scales may be padded. `args`
/// says which values are known; which copies exist is what `q` says.
void quantize_into(const at::Tensor& x, QuantizeArgs args, const QuantizedMatrix& q);

/// The maximum magnitude of x, as float32 of one element; of each row if `row_scaled`. NaN is ignored. `transformed`:
/// of the columnwise copy after its Hadamard transform.
at::Tensor quantization_amax(const at::Tensor& x, const Quantization& quantization, bool transformed);

/// Which scales a decoded copy contains: none, those of its blocks, or all.
enum class Decoding { codes, block_scaled, values };

/// A copy in the layout of its data, rounded to `dtype` once. `out`: contiguous destination; allocated if undefined.
at::Tensor decode_copy(const QuantizedMatrix& matrix, bool columnwise, Decoding decoding, at::ScalarType dtype,
                       at::Tensor out = {});

/// The values of a copy as a matrix [M, K], rounded to `dtype` once.
at::Tensor dequantize(const QuantizedMatrix& matrix, bool columnwise, at::ScalarType dtype);

/// y = x diag(s) H/4 for groups of 16 values along M, rounded to bfloat16; x is bfloat16 [M, K]. s: `kHadamardSigns`
/// (quantize_math.h).
at::Tensor hadamard_transform(const at::Tensor& x);

template <class Int>
CopySizes<Int>::CopySizes(const Quantization& how, const Int& matrix_rows, const Int& matrix_columns, bool columnwise) {
  const bool in_place = how.columns_in_place(), swapped = columnwise && !in_place;
  rows = swapped ? matrix_columns : matrix_rows;
  columns = swapped ? matrix_rows : matrix_columns;
  block_rows = how.two_dimensional || (columnwise && in_place) ? how.block : 1;
  block_columns = how.two_dimensional || !(columnwise && in_place) ? how.block : 1;
  if (how.block == 0) block_rows = 0;
  row_bytes = how.format == Format::e2m1 ? ceil_div(columns, 2) : columns;
  scale_rows = block_rows > 0 ? ceil_div(rows, block_rows) : Int(1);
  scale_columns = block_columns > 0 ? ceil_div(columns, block_columns) : Int(1);
  scale_bytes = how.scale_format == ScaleFormat::float32 ? 4 : 1;
  amax = !how.has_amax() ? Int(0) : how.row_scaled ? rows : Int(1);
}

}  // namespace weft::kernels
