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
  const at::Tensor* tiles = nullptr;  // of the left factor: the same values as `GemmResult::tiles`, if defined

  Matrix(const at::Tensor& t, bool transposed = false) : t(t), transposed(transposed) {}
  int64_t rows() const { return t.sizes()[transposed ? 1 : 0]; }
  int64_t columns() const { return t.sizes()[transposed ? 0 : 1]; }
  at::Tensor tensor() const { return transposed ? t.t() : t; }
};
inline Matrix transposed(const at::Tensor& t) { return {t, true}; }
/// `tiles`: of tᵀ, or undefined.
inline Matrix transposed(const at::Tensor& t, const at::Tensor& tiles) {
  Matrix m(t, true);
  m.tiles = &tiles;
  return m;
}

/// What happens to the product P = A B, A [M, K], B [K, N], before it is stored, in this order:
///   v = scale·P + bias            pre = v, if kept
///   v = act(v)                    gated: the columns of P are a, then b, and v has N/2 columns
///   v = v·act'(at)                instead of `act`, in backward; gated: `at` has 2N columns and so has v (da, then
///   db);
///                                 again = act(at), if kept: the value that forward did not save
///   sums = Σ_rows v, if kept
///   v = v + add
/// Computed in float32 (float64 for float64) and rounded once, at the store; the `ref` tier rounds between its calls.
struct Epilogue {
  double scale = 1;
  at::Tensor bias = {};  // [N]
  std::optional<Act> act = {};
  bool keep_pre = false;
  std::optional<Act> slope = {};
  at::Tensor at = {};
  bool keep_again = false;
  bool keep_sums = false;
  bool keep_tiles = false;  // a later product takes the transpose of the result as its left factor
  at::Tensor add = {};      // like the result; may be `out` itself: then the product is accumulated
  at::Tensor out = {};      // where to write; fresh memory if undefined
  bool weight = false;      // B is a weight: if it is frozen, its packed copy is used
  at::ScalarType dtype = at::ScalarType::Undefined;  // of fresh memory; that of A if undefined
  /// Called by the calling thread about every ten microseconds, if the tier is AMX's; must not raise.
  const std::function<void()>* between = nullptr;
};

struct GemmResult {
  at::Tensor out, pre, again;
  at::Tensor sums;   // float32 (float64 for float64)
  at::Tensor tiles;  // outᵀ in the order of `pack_rows`; undefined where out is not made in whole tiles
};

/// A B with its epilogue. Any strides, any sizes including 0. A and B have one dtype; `out`, `add`, `bias` any.
GemmResult gemm(const Matrix& a, const Matrix& b, const Epilogue& epilogue = {});

/// Which tier takes a product of matrices of `dtype` on `device`, K long, N wide (before gating).
Choice gemm_choice(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k);

}  // namespace weft::kernels
