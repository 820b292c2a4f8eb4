#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace weft::kernels {

enum class ActKind {
  gelu,
  qgelu,
  relu,
  srelu,
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

/// Any activation. Unary: y = f(x). Gated: x holds a, then b, in its last dimension, and y = f(a)·h(b).
///   gelu (tanh form)   qgelu x·σ(1.702x)   relu   srelu relu(x)²   silu x·σ(x)   glu σ
///   situglu            f = β1·tanh(a/β1)·σ(a),  h = β2·tanh(b/β2)
///   clamped_swiglu     f = ā·σ(alpha·ā) with ā = min(a, limit),  h = clamp(b, ±limit) + offset
/// All other gated kinds have h(b) = b.
struct Act {
  ActKind kind = ActKind::gelu;
  double limit = 7.0, alpha = 1.702, offset = 1.0;
  double beta1 = 4.0, beta2 = 25.0;
  int64_t interleave = 0;  // S > 0: x holds blocks of S values of a, then S values of b, alternating

  bool gated() const { return kind >= ActKind::glu; }
};

/// Both round once: low-precision values are computed in float32, the others in their own dtype. The last dimension of
/// a gated x is even, its half a multiple of the interleave size.
at::Tensor activation_forward(const Act& act, const at::Tensor& x);
/// dx in x's dtype, whatever the dtype of dy.
at::Tensor activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x);

struct ActivationColumnSums {
  at::Tensor dx, column_sums;
};
/// dx, and the float32 (float64 for float64) sums of its columns before they are rounded, in one sweep. In the
/// vector tiers the sums are the same for any number of threads.
ActivationColumnSums activation_backward_column_sums(const Act& act, const at::Tensor& dy, const at::Tensor& x);

/// y[row] = s[row]·act(x[row]), rounded once to x's dtype; s has one value for each row of x and any dtype.
at::Tensor scaled_activation_forward(const Act& act, const at::Tensor& x, const at::Tensor& scales);
/// dx (of dy·s) and ds[row] = Σ_columns dy·act(x), in the dtypes and shapes of x and s; undefined unless wanted.
std::pair<at::Tensor, at::Tensor> scaled_activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x,
                                                             const at::Tensor& scales, bool needs_dx, bool needs_ds);

}  // namespace weft::kernels
