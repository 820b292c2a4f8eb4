#pragma once
#include "weft/kernels/gemm.h"
#include "weft/kernels/quantize.h"

namespace weft::kernels {

/// One copy of a quantized matrix [M, K] as a GEMM operand. The GEMM reduces over the dimension along which the copy's
/// blocks run: the operand is [M, K] rowwise and [K, M] columnwise.
struct QuantizedOperand {
  const QuantizedMatrix& matrix;
  bool columnwise = false;
};

/// The epilogue of A Bᵀ. The products of codes are exact; sums, scales and the epilogue are float32, and the result is
/// rounded once. Codes, with their scales where those are powers of two or E4M3, are exact in bfloat16, so with AMX
/// this is one bfloat16 GEMM, except for other float32 scales of blocks (one GEMM per block of the reduction) and for
/// scales beyond the exponents of bfloat16 (a float32 GEMM). Without AMX it is a float32 GEMM. Takes `scale`, `bias`,
/// `addend`, `out` and `dtype` of the epilogue. Raises ValueError for operands that do
/// not fit.
at::Tensor quantized_gemm(const QuantizedOperand& a, const QuantizedOperand& b, const Epilogue& epilogue);

}  // namespace weft::kernels
