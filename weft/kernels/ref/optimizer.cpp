#include <cmath>

#include "weft/kernels/cpu/optimizer_loops.h"

namespace weft::kernels::ref {
namespace {

float read_element(const Elements& e, int64_t i) {
  switch (e.dtype) {
    case at::kBFloat16:
      return static_cast<const at::BFloat16*>(e.data)[i];
    case at::kHalf:
      return static_cast<const at::Half*>(e.data)[i];
    default:
      return static_cast<const float*>(e.data)[i];
  }
}

void write_element(const Elements& e, int64_t i, float value) {
  switch (e.dtype) {
    case at::kBFloat16:
      static_cast<at::BFloat16*>(e.data)[i] = value;
      break;
    case at::kHalf:
      static_cast<at::Half*>(e.data)[i] = value;
      break;
    default:
      static_cast<float*>(e.data)[i] = value;
  }
}

/// `value` as `dtype` holds it.
float rounded_to(at::ScalarType dtype, float value) {
  if (dtype == at::kBFloat16) return static_cast<at::BFloat16>(value);
  return dtype == at::kHalf ? static_cast<float>(static_cast<at::Half>(value)) : value;
}

void adam_loop(const AdamCall& c, int64_t count) {
  const auto& o = c.options;
  for (int64_t i = 0; i < count; ++i) {
    float g = read_element(c.grad, i), w = read_element(c.weight, i);
    if (o.grad_scale != 1) write_element(c.grad, i, g *= o.grad_scale);
    if (!o.decoupled) g += o.weight_decay * w;
    const float m = o.beta1 * read_element(c.exp_avg, i) + (1 - o.beta1) * g;
    const float v = o.beta2 * read_element(c.exp_avg_sq, i) + (1 - o.beta2) * g * g;
    float update = (m / o.correction1) / (std::sqrt(v / o.correction2) + o.eps);
    if (o.decoupled) update += o.weight_decay * w;
    w -= o.lr * update;
    write_element(c.exp_avg, i, m);
    write_element(c.exp_avg_sq, i, v);
    write_element(c.weight, i, w);
    if (c.rounded.data) write_element(c.rounded, i, w);
  }
}

void sgd_loop(const SgdCall& c, int64_t count) {
  const auto& o = c.options;
  for (int64_t i = 0; i < count; ++i) {
    const float w = read_element(c.weight, i);
    float g = read_element(c.grad, i) * o.grad_scale;
    if (o.weight_decay != 0 && !o.decay_after_momentum) g += o.weight_decay * w;
    if (o.momentum != 0) {
      const float m = o.first_step ? g : o.momentum * read_element(c.momentum, i) + (1 - o.dampening) * g;
      write_element(c.momentum, i, m);
      g = o.nesterov ? g + o.momentum * m : m;
    }
    if (o.weight_decay != 0 && o.decay_after_momentum) g += o.weight_decay * w;
    write_element(c.weight, i, w - rounded_to(c.weight.dtype, o.lr * g));
    if (c.copy.data) write_element(c.copy, i, read_element(c.weight, i));
  }
}

bool scale_loop(const Elements& out, const Elements& x, float factor, int64_t count) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    const float value = read_element(x, i);
    finite = finite && std::isfinite(value);
    write_element(out, i, value * factor);
  }
  return finite;
}

float sum_of_squares_loop(const Elements& x, float factor, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = read_element(x, i) * factor;
    sum += value * value;
  }
  return sum;
}

}  // namespace

const OptimizerLoops optimizer_loops{adam_loop, sgd_loop, scale_loop, sum_of_squares_loop};

}  // namespace weft::kernels::ref
