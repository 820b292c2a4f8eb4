#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "weft/kernels/activation.h"
#include "weft/kernels/tier.h"

namespace weft::kernels {

/// A factor of a product: a tensor of two dimensions, or its transpose, without making a view, which costs more than a
/// small product. Refers to the tensors.
struct Matrix {
  const at::Tensor& t;
  bool transposed = false;
  const at::Tensor* packed =
      nullptr;  // of the left factor: the same values as `GemmResult::packed_transpose`, if defined

  Matrix(const at::Tensor& t, bool transposed = false) : t(t), transposed(transposed) {}
  int64_t rows() const { return t.sizes()[transposed ? 1 : 0]; }
  int64_t columns() const { return t.sizes()[transposed ? 0 : 1]; }
  at::Tensor tensor() const { return transposed ? t.t() : t; }
};
inline Matrix transposed(const at::Tensor& t) { return {t, true}; }
/// `packed`: tᵀ as `pack_rows` lays it out, or undefined.
inline Matrix transposed(const at::Tensor& t, const at::Tensor& packed) {
  Matrix m(t, true);
  m.packed = &packed;
  return m;
}

/// What happens to the product P = A B, A [M, K], B [K, N], before it is stored, in this order:
///   v = scale·P + bias            pre_act = v, if kept
///   v = act(v)                    gated: the columns of P are a, then b, and v has N/2 columns
///   v = v·act'(act_input)         `act_grad` instead of `act`, in backward; gated: `act_input` has 2N columns and so
///   has v (da, then db);
///                                 act_output = act(act_input), if kept: the value that forward did not save
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
  bool keep_packed_transpose = false;  // a later product takes the transpose of the result as its left factor
  at::Tensor addend = {};              // like the result; may be `out` itself: then the product is accumulated
  at::Tensor out = {};                 // where to write; fresh memory if undefined
  bool b_is_weight = false;            // B is a weight: if it is frozen, its packed copy is used
  at::ScalarType dtype = at::ScalarType::Undefined;  // of fresh memory; that of A if undefined
  /// Called by the calling thread about every ten microseconds, if the tier is AMX's; must not raise.
  const std::function<void()>* progress = nullptr;
};

struct GemmResult {
  at::Tensor out, pre_act, act_output;
  at::Tensor column_sums;       // float32 (float64 for float64)
  at::Tensor packed_transpose;  // outᵀ in the order of `pack_rows`; undefined where out is not made in whole tiles
};

/// A B with its epilogue. Any strides, any sizes including 0. A and B have one dtype; `out`, `addend`, `bias` any.
GemmResult gemm(const Matrix& a, const Matrix& b, const Epilogue& epilogue = {});

/// Which tier takes a product of matrices of `dtype` on `device`, K long, N wide (before gating).
TierChoice choose_gemm_tier(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k);

}  // namespace weft::kernels
