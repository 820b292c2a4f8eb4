#pragma once
#include "weft/te/gemm.h"

// GEMMs that the cuBLAS of a GPU refuses. In strict mode weft refuses them too; otherwise it computes them.

namespace weft::te {

/// What a GEMM does besides multiplying.
struct GemmFeatures {
  bool bias = false, bias_grad = false, gelu = false, gelu_grad = false, split_accumulator = true;
  at::ScalarType dtype = at::kFloat;  // of the output
};

/// Raises RuntimeError in strict mode for quantized operands that the simulated GPU does not multiply. `who` names the
/// function.
void check_gemm_limits(const char* who, const GemmOperands& operands, const GemmFeatures& features);

struct LinearSizes {
  int64_t rows, in_features, out_features;
  bool with_backward;
  at::ScalarType dtype = at::kBFloat16;  // of the activations
};
/// The same, and ValueError for parts of blocks, for the three GEMMs of a linear whose tensors are quantized in one
/// way.
void check_linear_limits(const char* who, const kernels::Quantization& quantization, const LinearSizes& sizes);

}  // namespace weft::te
