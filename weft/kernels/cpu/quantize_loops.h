#pragma once
#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/quantize.h"

// Loops that quantize regions of a matrix, compiled once per instruction set.

namespace weft::kernels {

/// Rows and columns of a region with columnwise or square blocks: a multiple of every block.
constexpr int64_t kQuantizeRegion = 128;

/// The memory of a copy; null pointers if it does not exist.
struct CopyPointers {
  uint8_t* data = nullptr;
  int64_t ld = 0;  // bytes per row of data
  float* float32_scales = nullptr;
  uint8_t* scale_codes = nullptr;
  int64_t scales_ld = 0;        // scales per row
  const float* amax = nullptr;  // E4M3 scales: of the copy, or of each of its rows
};

/// Quantizes x [rows, columns], contiguous, of `dtype`, region by region.
struct QuantizeCall {
  Quantization how;
  at::ScalarType dtype = at::kFloat;
  const void* x = nullptr;
  int64_t rows = 0, columns = 0;
  float scale = 1;        // with block 0
  float scale_limit = 0;  // float32 scales of blocks
  CopyPointers rowwise, columnwise;
  RandomStream random;
  int64_t region_rows = kQuantizeRegion, region_columns = kQuantizeRegion;
};

/// Decodes a copy, seen as a matrix [rows, columns] in the layout of its data, to a contiguous matrix.
struct DequantizeCall {
  Quantization how;
  CopyPointers copy;
  int64_t columns = 0;
  int64_t block_rows = 1, block_columns = 1;  // values that share a scale
  Decoding decoding = Decoding::values;
  at::ScalarType dtype = at::kFloat;
  void* out = nullptr;
};

struct QuantizeLoops {
  /// Quantizes the region that starts at (row, column).
  void (*quantize)(const QuantizeCall& call, int64_t row, int64_t column);
  /// The maximum magnitude of `count` elements.
  float (*amax)(at::ScalarType dtype, const void* x, int64_t count);
  /// Transforms rows [begin, end), whole groups of 16, of a bfloat16 matrix.
  void (*hadamard)(const void* x, void* out, int64_t columns, int64_t begin, int64_t end);
  /// Decodes rows [begin, end).
  void (*dequantize)(const DequantizeCall& call, int64_t begin, int64_t end);
};

#define WEFT_DECLARE(set)                    \
  namespace set {                            \
  extern const QuantizeLoops quantize_loops; \
  }
WEFT_INSTRUCTION_SETS(WEFT_DECLARE)
#undef WEFT_DECLARE

inline const QuantizeLoops& quantize_loops(Tier tier) { return WEFT_LOOPS(tier, quantize_loops); }

}  // namespace weft::kernels
