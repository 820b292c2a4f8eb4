#pragma once
#include "weft/kernels/gemm.h"

// The tiers of each kernel, for the file that chooses between them. Not installed.

namespace weft::kernels::ref {
GemmResult gemm(const at::Tensor& a, const at::Tensor& b, Epilogue epilogue);
}  // namespace weft::kernels::ref
