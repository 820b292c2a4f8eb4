#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace weft::kernels {

enum class ActKind {
  gelu,
  gelu_erf,
  qgelu,
  relu,
  srelu,
  tanh_srelu,
  silu,  // unary
  glu,
  geglu,
  qgeglu,
  reglu,
  sreglu,
  swiglu,
  situglu,
  clamped_swiglu  // gated
};

/// An activation. Unary: y = f(x). Gated: the last dimension of x holds a, then b, and y = f(a)·h(b).
///   gelu (tanh form)   gelu_erf x·Φ(x)   qgelu x·σ(1.702x)   relu   srelu relu(x)²   silu x·σ(x)   glu σ
///   tanh_srelu         (β1·tanh(relu(x)/β1))²
///   situglu            f = β1·tanh(a/β1)·σ(a),  h = β2·tanh(b/β2)
///   clamped_swiglu     f = ā·σ(alpha·ā) with ā = min(a, limit),  h = clamp(b, ±limit) + offset
/// The other gated kinds have h(b) = b.
struct Act {
  ActKind kind = ActKind::gelu;
  double limit = 7.0, alpha = 1.702, offset = 1.0;
  double beta1 = 4.0, beta2 = 25.0;
  int64_t interleave = 0;  // S > 0: x alternates S elements of a and S elements of b

  bool gated() const { return kind >= ActKind::glu; }
};

/// y = act(x). Low-precision inputs are computed in float32, the others in their own dtype; the result is rounded once.
/// A gated x has an even last dimension, half of which is a multiple of `interleave`.
at::Tensor activation_forward(const Act& act, const at::Tensor& x);
/// dx = dy·act'(x), in the dtype of x and rounded once; dy may have another dtype.
at::Tensor activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x);

struct ActivationColumnSums {
  at::Tensor dx, column_sums;
};
/// dx and its column sums, summed in float32 (float64 for float64) before dx is rounded, in one pass. In the vector
/// tiers the sums are bitwise the same for any number of threads.
ActivationColumnSums activation_backward_column_sums(const Act& act, const at::Tensor& dy, const at::Tensor& x);

/// y[row] = s[row]·act(x[row]), rounded once to x's dtype; s has one element per row of x and any dtype.
at::Tensor scaled_activation_forward(const Act& act, const at::Tensor& x, const at::Tensor& scales);
/// dx = dy·s·act'(x) and ds[row] = Σ_columns dy·act(x), with the dtypes and shapes of x and s; undefined unless needed.
std::pair<at::Tensor, at::Tensor> scaled_activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x,
                                                             const at::Tensor& scales, bool needs_dx, bool needs_ds);

}  // namespace weft::kernels
