#pragma once
#include <functional>
#include <vector>

#include "weft/kernels/gemm.h"
#include "weft/kernels/quantize.h"

namespace weft::kernels {

/// One copy of a quantized matrix [M, K] as a GEMM operand. The GEMM reduces over the dimension along which the copy's
/// blocks run: the operand is [M, K] rowwise and [K, M] columnwise. With one scale for all values, a columnwise operand
/// is read from the rowwise copy if the matrix has no columnwise one.
struct QuantizedOperand {
  const QuantizedMatrix& matrix;
  bool columnwise = false;
};

/// Computes A Bᵀ and applies the epilogue. The products of codes are exact; sums, scales and the epilogue are float32,
/// and the result is rounded once. Codes, with their scales where those are powers of two or E4M3, are exact in
/// bfloat16, so with AMX this is one bfloat16 GEMM, except for other float32 scales of blocks (one GEMM per block of
/// the reduction) and for scales beyond the exponents of bfloat16 (a float32 GEMM). Without AMX it is a float32 GEMM.
/// Before an activation, v is rounded to the nominal dtype of A, so that what is quantized next has the codes that
/// separate operations give. Raises ValueError for operands that do not fit.
GemmResult quantized_gemm(const QuantizedOperand& a, const QuantizedOperand& b, const Epilogue& epilogue);

/// The left operand of a quantized GEMM whose rows arrive in chunks, like RowChunks. Chunks are rowwise copies with the
/// same quantization; a scale or maximum of the whole matrix is that of the first chunk.
struct QuantizedRowChunks {
  struct Chunk {
    QuantizedMatrix matrix;
    int64_t row = 0;  // first row of the chunk in the result
  };
  std::vector<Chunk> list = {};  // in processing order; the first one is ready
  int64_t rows = 0;              // of the whole GEMM
  int64_t min_block_rows = 64;
  /// As in RowChunks; the scales of a chunk are ready with its first row.
  std::function<int64_t(int chunk, int64_t from)> ready = {};
  std::function<void()> progress = {};
};

/// Whether rows with this quantization can be multiplied as they arrive. They cannot if blocks span rows or have
/// arbitrary float32 scales, or if each row has a scale.
bool multiplies_in_chunks(const Quantization& quantization);

/// The same for rows that arrive in chunks; each row is decoded when it has arrived.
GemmResult quantized_gemm(const QuantizedRowChunks& a, const QuantizedOperand& b, const Epilogue& epilogue);

}  // namespace weft::kernels
