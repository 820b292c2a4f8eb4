#pragma once
#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/optimizer_loops.h"

namespace weft::kernels::CPU_CAPABILITY {

template <class Count>
Vec read(const Elements& e, int64_t i, Count count) {
  return read(e.dtype, e.data, i, count);
}
template <class Count>
void write(const Elements& e, int64_t i, const Vec& v, Count count) {
  write(e.dtype, e.data, i, v, count);
}

/// v as `dtype` holds it.
inline Vec rounded_to(at::ScalarType dtype, const Vec& v) {
  if (dtype == at::kBFloat16) return widen_bf16(narrow_bf16(v));
  if (dtype == at::kHalf) return widen_fp16(narrow_fp16(v));
  return v;
}

static void adam_loop(const AdamCall& c, int64_t n) {
  const auto& o = c.options;
  const Vec lr(o.lr), beta1(o.beta1), beta2(o.beta2), rest1(1 - o.beta1), rest2(1 - o.beta2), eps(o.eps),
      decay(o.weight_decay), correction1(o.correction1), correction2(o.correction2), grad_scale(o.grad_scale);
  for_each_vector(n, [&](int64_t i, auto count) {
    Vec g = read(c.grad, i, count), w = read(c.weight, i, count);
    if (o.grad_scale != 1) {
      g = g * grad_scale;
      write(c.grad, i, g, count);
    }
    if (!o.decoupled) g = g + decay * w;
    const Vec m = beta1 * read(c.exp_avg, i, count) + rest1 * g;
    const Vec v = beta2 * read(c.exp_avg_sq, i, count) + rest2 * g * g;
    Vec update = (m / correction1) / ((v / correction2).sqrt() + eps);
    if (o.decoupled) update = update + decay * w;
    w = w - lr * update;
    write(c.exp_avg, i, m, count);
    write(c.exp_avg_sq, i, v, count);
    write(c.weight, i, w, count);
    if (c.rounded.data) write(c.rounded, i, w, count);
  });
}

static void sgd_loop(const SgdCall& c, int64_t n) {
  const auto& o = c.options;
  const Vec lr(o.lr), momentum(o.momentum), rest(1 - o.dampening), decay(o.weight_decay), grad_scale(o.grad_scale);
  for_each_vector(n, [&](int64_t i, auto count) {
    const Vec w = read(c.weight, i, count);
    Vec g = read(c.grad, i, count) * grad_scale;
    if (o.weight_decay != 0 && !o.decay_after_momentum) g = g + decay * w;
    if (o.momentum != 0) {
      const Vec m = o.first_step ? g : momentum * read(c.momentum, i, count) + rest * g;
      write(c.momentum, i, m, count);
      g = o.nesterov ? g + momentum * m : m;
    }
    if (o.weight_decay != 0 && o.decay_after_momentum) g = g + decay * w;
    write(c.weight, i, w - rounded_to(c.weight.dtype, lr * g), count);
    if (c.copy.data) write(c.copy, i, read(c.weight, i, count), count);
  });
}

static bool scale_loop(const Elements& out, const Elements& x, float factor, int64_t n) {
  Vec zeros(0.F);  // x - x is 0, or NaN if x is not finite
  for_each_vector(n, [&](int64_t i, auto count) {
    const Vec v = read(x, i, count);
    zeros = zeros + (v - v);
    write(out, i, v * Vec(factor), count);
  });
  return sum_lanes(zeros) == 0;
}

static float sum_of_squares_loop(const Elements& x, float factor, int64_t n) {
  Vec sum(0.F);
  for_each_vector(n, [&](int64_t i, auto count) {
    const Vec v = read(x, i, count) * Vec(factor);
    sum = sum + v * v;
  });
  return sum_lanes(sum);
}

const OptimizerLoops optimizer_loops{adam_loop, sgd_loop, scale_loop, sum_of_squares_loop};

}  // namespace weft::kernels::CPU_CAPABILITY
