#pragma once
#include <ATen/core/Tensor.h>

#include "weft/core/formats.h"

// Steps of optimizers, each one pass over the memory of a parameter. All arithmetic is float32, and each tensor that a
// step writes is rounded once. The tensors are contiguous and have the same number of elements; they are float32,
// bfloat16 or float16 in any combination, unless stated otherwise.

namespace weft::kernels {

/// With g the gradient and w the weight:
///   m = beta1·m + (1 - beta1)·g,  v = beta2·v + (1 - beta2)·g²,  u = (m / correction1) / (√(v / correction2) + eps)
/// and w -= lr·(u + weight_decay·w) if decoupled (AdamW); else g += weight_decay·w first, and w -= lr·u.
struct AdamOptions {
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  float correction1 = 1, correction2 = 1;  // 1 - beta^step with bias correction
  bool decoupled = false;
  float grad_scale = 1;  // the gradient is multiplied by it first, in place
};
struct AdamTensors {
  at::Tensor grad, param, exp_avg, exp_avg_sq;
};

/// Updates the parameter, or a float32 `master`, which is then rounded to the parameter.
void adam_step(const AdamTensors& t, const AdamOptions& options, const at::Tensor& master = {});

/// The parameter is bfloat16, and `low_bits`, int16, has the other half of its float32 value. The parameter is that
/// value with the lower half removed, plus 1 in its last bit if the lower half, as an int16, is negative.
void adam_step_split(const AdamTensors& t, const AdamOptions& options, const at::Tensor& low_bits);

/// The parameter has uint8 codes of `format`: the float32 `master` times `scale`. Returns the maximum magnitude of the
/// new `master`.
float adam_step_quantized(const AdamTensors& t, const AdamOptions& options, const at::Tensor& master, float scale,
                          Format format);

/// g = grad_scale·grad + weight_decay·w;  m = momentum·m + (1 - dampening)·g, in the first step m = g;  g = m, or
/// g + momentum·m with Nesterov;  w -= lr·g, which is rounded to the dtype of w first, as on a GPU. Without momentum m
/// stays as it is.
struct SgdOptions {
  float lr = 0, momentum = 0, dampening = 0, weight_decay = 0, grad_scale = 1;
  bool nesterov = false, first_step = false;
  bool decay_after_momentum = false;  // add weight_decay·w to g before the last step instead of the first
};
struct SgdTensors {
  at::Tensor grad, param, momentum;
};
/// The new parameter is also copied to `copy` if that is defined.
void sgd_step(const SgdTensors& t, const SgdOptions& options, const at::Tensor& copy = {});

/// out = scale·x. Returns whether all of x is finite. `out` may be x.
bool scale_into(const at::Tensor& out, const at::Tensor& x, float scale);

/// Σ (scale·x)². Bitwise the same for any number of threads.
double sum_of_squares(const at::Tensor& x, float scale = 1);

}  // namespace weft::kernels
