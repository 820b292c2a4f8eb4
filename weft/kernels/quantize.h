#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

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
  at::Tensor data;    // uint8 codes: [M, K], columnwise [K, M]; with two E2M1 codes per byte. E8M0 columnwise: [M, K]
  at::Tensor scales;  // one per block, in the layout of data. float32 scales: their inverses; else uint8 codes
  at::Tensor amax;    // float32: of the matrix, or of each row; undefined with blocks of float32 or E8M0 scales

  bool defined() const { return data.defined(); }
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

/// Raises ValueError for options that exclude each other.
void check_options(const Quantization& quantization);

/// Quantizes x [M, K], of float32, bfloat16 or float16. The bytes are the same in every tier and for any number of
/// threads.
QuantizedMatrix quantize(const at::Tensor& x, const Quantization& quantization, const QuantizeArgs& args);

/// The maximum magnitude of x, as float32 of one element; of each row if `row_scaled`. NaN is ignored. `transformed`:
/// of the columnwise copy after its Hadamard transform.
at::Tensor quantization_amax(const at::Tensor& x, const Quantization& quantization, bool transformed);

/// Which scales a decoded copy contains: none, those of its blocks, or all.
enum class Decoding { codes, block_scaled, values };

/// A copy in the layout of its data, rounded to `dtype` once.
at::Tensor decode_copy(const QuantizedMatrix& matrix, bool columnwise, Decoding decoding, at::ScalarType dtype);

/// The values of a copy as a matrix [M, K], rounded to `dtype` once.
at::Tensor dequantize(const QuantizedMatrix& matrix, bool columnwise, at::ScalarType dtype);

/// y = x diag(s) H/4 for groups of 16 values along M, rounded to bfloat16; x is bfloat16 [M, K]. s: `kHadamardSigns`
/// (quantize_math.h).
at::Tensor hadamard_transform(const at::Tensor& x);

}  // namespace weft::kernels
