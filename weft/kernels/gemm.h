#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "weft/kernels/activation.h"
#include "weft/kernels/tier.h"

namespace weft::kernels {

/// A GEMM operand: a 2-D tensor or its transpose. Holds references and creates no view, which would cost more than a
/// small GEMM.
struct Matrix {
  const at::Tensor& t;
  bool transposed = false;
  const at::Tensor* packed = nullptr;  // left operand only: this matrix as packed by `pack_rows`; may be undefined

  Matrix(const at::Tensor& t, bool transposed = false) : t(t), transposed(transposed) {}
  int64_t rows() const { return t.sizes()[transposed ? 1 : 0]; }
  int64_t columns() const { return t.sizes()[transposed ? 0 : 1]; }
  at::Tensor tensor() const { return transposed ? t.t() : t; }
};
inline Matrix transposed(const at::Tensor& t) { return {t, true}; }
/// `packed`: tᵀ as packed by `pack_rows`, or undefined.
inline Matrix transposed(const at::Tensor& t, const at::Tensor& packed) {
  Matrix m(t, true);
  m.packed = &packed;
  return m;
}

/// The epilogue of P = A B, A [M, K], B [K, N]. It is applied before the store, in this order:
///   v = scale·P + bias            pre_act = v, if kept
///   v = act(v)                    gated: the columns of P are a, then b; v has N/2 columns
///   v = v·act'(act_input)         backward: `act_grad` instead of `act`
///                                 gated: act_input and v have 2N columns (a, then b; da, then db)
///                                 act_output = act(act_input), if kept: the activation that forward did not save
///   column_sums = Σ_rows v, if kept
///   v = v + addend
/// Computed in float32 (float64 for float64) and rounded once, at the store; the `ref` tier rounds between its calls.
struct Epilogue {
  double scale = 1;
  at::Tensor bias = {};  // [N]
  std::optional<Act> act = {};
  bool keep_pre_act = false;
  std::optional<Act> act_grad = {};
  at::Tensor act_input = {};
  bool keep_act_output = false;
  bool keep_column_sums = false;
  bool keep_packed_transpose = false;  // a later GEMM reads the transpose of the result as its left operand
  at::Tensor addend = {};              // shape of the result; pass `out` itself to accumulate into it
  at::Tensor out = {};                 // destination; allocated if undefined
  bool b_is_weight = false;            // B is a weight: use its packed copy if it is frozen
  at::ScalarType dtype = at::ScalarType::Undefined;  // of an allocated result; dtype of A if undefined
  /// AMX tier only: called on the calling thread about every 10 µs. Must not throw.
  const std::function<void()>* progress = nullptr;

  at::ScalarType result_dtype(at::ScalarType a_dtype) const {
    if (out.defined()) return out.scalar_type();
    return dtype == at::ScalarType::Undefined ? a_dtype : dtype;
  }
};

struct GemmResult {
  at::Tensor out, pre_act, act_output;
  at::Tensor column_sums;       // float32 (float64 for float64)
  at::Tensor packed_transpose;  // outᵀ as packed by `pack_rows`; undefined unless out consists of full blocks
};

/// Computes A B and applies the epilogue. Any strides and sizes, including 0. A and B have the same dtype; `out`,
/// `addend` and `bias` may have another.
GemmResult gemm(const Matrix& a, const Matrix& b, const Epilogue& epilogue = {});

/// The epilogue alone, of a product P that is given: float32 [M, N], which may be overwritten. v is rounded to `dtype`
/// before an activation, as if separate operations of this dtype stored it; pre_act, and the result if `out` and the
/// epilogue's dtype are undefined, have this dtype.
GemmResult apply_epilogue(const at::Tensor& product, const Epilogue& epilogue, at::ScalarType dtype);

/// The tier for a GEMM with B [K, N] of `dtype` on `device`; N counts the columns before gating.
TierChoice choose_gemm_tier(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k);

}  // namespace weft::kernels
