#pragma once
#include "weft/kernels/gemm.h"
#include "weft/te/quantized_tensor.h"

// GEMMs with the operands of Transformer Engine: D = op(B) op(A), each operand plain or quantized. The names are those
// of cuBLAS, whose column-major D = op(A) op(B) is the same.

namespace weft::te {

/// D [M, N] = op(B) op(A): A is [K, N], or [N, K] if `transa`; B is [M, K], or [K, M] if `transb`. Leading dimensions
/// are flattened into rows.
struct GemmOperands {
  Operand a, b;
  bool transa, transb;

  int64_t rows() const;       // M
  int64_t columns() const;    // N
  int64_t reduction() const;  // K, of A
  bool empty() const { return rows() == 0 || columns() == 0 || reduction() == 0; }
};

/// Reads the copies that the GEMM reduces over. Raises ValueError if the operands do not fit; `who` names the function.
GemmOperands read_gemm_operands(const char* who, py::handle a, bool transa, py::handle b, bool transb);

/// The dtype of an operand's values before quantization.
at::ScalarType nominal_dtype(const Operand& operand);

/// D with the epilogue of `kernels::gemm`: fused if an operand is plain, else what `kernels::quantized_gemm` does not
/// take is computed in float32 after it. An operand that alone is quantized is multiplied by its values. `e.dtype` or
/// `e.out` is set; `pre_act` has any floating-point dtype.
kernels::GemmResult multiply(const GemmOperands& operands, const kernels::Epilogue& e);

/// The sums over the rows of B, the gradient of the bias that was added to the output that B is the gradient of.
at::Tensor sum_rows_of_b(const GemmOperands& operands, at::ScalarType dtype);

/// The activation of `gelu` in GEMMs.
constexpr kernels::Act kGelu{.kind = kernels::ActKind::gelu};

void bind_grouped_gemm(py::module_& m);

}  // namespace weft::te
