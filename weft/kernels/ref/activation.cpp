#include "weft/kernels/activation.h"

#include <ATen/ops/add.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <algorithm>
#include <cmath>

#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::ref {
namespace {

constexpr double kQuickGelu = 1.702;

at::Tensor relu(const at::Tensor& x) { return at::clamp_min(x, 0); }  // at::relu has no meta kernel

/// Clamps finite x to ±10⁴, where every derivative has reached its limit, and maps infinite x to NaN. For larger finite
/// arguments ATen's derivatives overflow and give NaN.
at::Tensor clamp_for_grad(const at::Tensor& x) { return at::clamp(x, -1e4, 1e4).add_(at::mul(x, 0)); }

/// x·σ(k·x), whose derivative is silu'(k·x).
at::Tensor swish(const at::Tensor& x, double k) { return at::mul(x, k).sigmoid_().mul_(x); }

/// t = tanh(relu(x)/β1).
at::Tensor tanh_relu(const Act& act, const at::Tensor& x) { return relu(x).div_(act.beta1).tanh_(); }

/// f(x) of a unary kind, or of the gate of a gated kind. Never aliases x.
at::Tensor unary_forward(const Act& act, const at::Tensor& x) {
  switch (act.kind) {
    case ActKind::gelu:
    case ActKind::geglu:
      return at::gelu(x, "tanh");
    case ActKind::gelu_erf:  // at::gelu gives NaN at inf, and 1 + erf cancels
      return at::mul(x, -std::sqrt(0.5)).erfc_().mul_(0.5).mul_(x);
    case ActKind::qgelu:
    case ActKind::qgeglu:
      return swish(x, kQuickGelu);
    case ActKind::relu:
    case ActKind::reglu:
      return relu(x);
    case ActKind::silu:
    case ActKind::swiglu:
      return at::silu(x);
    case ActKind::glu:
      return at::sigmoid(x);
    default:
      break;
  }
  auto y = act.kind == ActKind::tanh_srelu ? tanh_relu(act, x).mul_(act.beta1) : relu(x);  // else srelu, sreglu
  return y.mul_(y);
}

/// dy·f'(x) of a unary kind.
at::Tensor unary_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x) {
  switch (act.kind) {
    case ActKind::gelu:
      return at::gelu_backward(dy, clamp_for_grad(x), "tanh");
    case ActKind::gelu_erf:
      return at::gelu_backward(dy, x, "none");
    case ActKind::qgelu:
      return at::silu_backward(dy, clamp_for_grad(to_opmath(x)).mul_(kQuickGelu));
    case ActKind::relu:
      return at::threshold_backward(dy, x, 0);
    case ActKind::silu:
      return at::silu_backward(dy, x);
    case ActKind::tanh_srelu: {  // 2·β1²·t·tanh'/β1
      const auto t = tanh_relu(act, to_opmath(x));
      return at::tanh_backward(at::mul(t, 2 * act.beta1).mul_(dy), t);
    }
    default:
      return relu(x).mul_(dy).mul_(2);  // srelu; doubling is exact
  }
}

/// a and b of a gated x, as views: [..., H] each, [..., H/S, S] if interleaved.
struct Halves {
  at::Tensor a, b;
  Halves(const Act& act, const at::Tensor& x) {
    const auto h = x.size(-1) / 2;
    if (act.interleave == 0) {
      a = x.narrow(-1, 0, h), b = x.narrow(-1, h, h);
    } else {
      const auto blocks = x.unflatten(-1, {h / act.interleave, 2, act.interleave});
      a = blocks.select(-2, 0), b = blocks.select(-2, 1);
    }
  }
};

/// Reshapes y [..., H] to the shape of a half.
at::Tensor as_half(const Act& act, const at::Tensor& y) {
  return act.interleave == 0 ? y : y.unflatten(-1, {y.size(-1) / act.interleave, act.interleave});
}

struct Situ {  // t = tanh(a/β1), s = σ(a), u = tanh(b/β2)
  at::Tensor t, s, u;
  Situ(const Act& act, const at::Tensor& a, const at::Tensor& b)
      : t(at::div(a, act.beta1).tanh_()), s(at::sigmoid(a)), u(at::div(b, act.beta2).tanh_()) {}
};

at::Tensor gated_value(const Act& act, const at::Tensor& x) {
  const Halves in(act, x);
  const auto a = to_opmath(in.a);
  at::Tensor y;
  if (act.kind == ActKind::situglu) {
    const Situ f(act, a, to_opmath(in.b));
    y = at::mul(f.t, f.s).mul_(f.u).mul_(act.beta1 * act.beta2);
  } else if (act.kind == ActKind::clamped_swiglu) {
    const auto h = at::clamp(to_opmath(in.b), -act.limit, act.limit).add_(act.offset);
    y = swish(at::clamp_max(a, act.limit), act.alpha).mul_(h);
  } else {
    y = unary_forward(act, a).mul_(in.b);
  }
  return act.interleave == 0 ? y : y.flatten(-2);
}

/// da = tanh'(g·s) + σ'(β1·g·t) with g = dy·β2·u;  db = tanh'(dy·β1·t·s).
void situ_backward(const Act& act, const at::Tensor& dy, const Halves& x, Halves& dx) {
  const Situ f(act, to_opmath(x.a), to_opmath(x.b));
  const auto g = at::mul(f.u, act.beta2).mul_(dy);
  const auto through_tanh = at::tanh_backward(at::mul(g, f.s), f.t);
  at::add_out(dx.a, through_tanh, at::sigmoid_backward(at::mul(g, f.t).mul_(act.beta1), f.s));
  at::tanh_backward_out(dx.b, at::mul(f.t, f.s).mul_(act.beta1).mul_(dy), f.u);
}

/// da = dy·b̄·silu'(alpha·ā) where a ≤ limit;  db = dy·ā·σ(alpha·ā) where |b| ≤ limit;  else 0.
void clamped_backward(const Act& act, const at::Tensor& dy, const Halves& x, Halves& dx) {
  const auto a = to_opmath(x.a), b = to_opmath(x.b);
  const auto gate = at::clamp_max(a, act.limit), linear = at::clamp(b, -act.limit, act.limit);
  at::silu_backward_out(dx.a, at::add(linear, act.offset).mul_(dy), clamp_for_grad(gate).mul_(act.alpha));
  dx.a.masked_fill_(at::ne(gate, a), 0);
  at::mul_out(dx.b, swish(gate, act.alpha), dy);
  dx.b.masked_fill_(at::ne(linear, b), 0);
}

/// da = dy·b·f'(a);  db = dy·f(a).
void gate_backward(ActKind kind, const at::Tensor& dy, const Halves& x, Halves& dx) {
  const auto a = to_opmath(x.a);
  auto g = at::mul(to_opmath(dy), x.b);
  auto f = unary_forward({.kind = kind == ActKind::sreglu ? ActKind::relu : kind}, a);
  switch (kind) {
    case ActKind::glu:
      at::sigmoid_backward_out(dx.a, g, f);
      break;
    case ActKind::geglu:
      at::gelu_backward_out(dx.a, g, clamp_for_grad(a), "tanh");
      break;
    case ActKind::qgeglu:
      at::silu_backward_out(dx.a, g, clamp_for_grad(a).mul_(kQuickGelu));
      break;
    case ActKind::reglu:
      at::threshold_backward_out(dx.a, g, a, 0);
      break;
    case ActKind::swiglu:
      at::silu_backward_out(dx.a, g, a);
      break;
    default:
      at::mul_out(dx.a, g.mul_(2), f);
      f.mul_(f);
  }
  at::mul_out(dx.b, f, dy);
}

/// f(x) of any kind without the final rounding.
at::Tensor unrounded(const Act& act, const at::Tensor& x) {
  return act.gated() ? gated_value(act, x) : unary_forward(act, to_opmath(x));
}

at::Tensor as_column(const at::Tensor& scales, const at::Tensor& x) {
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  return scales.reshape(sizes);
}

}  // namespace

at::Tensor activation_forward(const Act& act, const at::Tensor& x) {
  using enum ActKind;
  if (act.gated() || act.kind == qgelu || act.kind == gelu_erf || act.kind == tanh_srelu)
    return as_dtype(unrounded(act, x), x.scalar_type());
  return unary_forward(act, x);  // ATen's kernels for these round once
}

at::Tensor activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x) {
  if (!act.gated()) return as_dtype(unary_backward(act, dy, x), x.scalar_type());
  auto dx = at::empty_like(x);
  const Halves in(act, x);
  Halves out(act, dx);
  const auto grad = as_half(act, dy);
  if (act.kind == ActKind::situglu) {
    situ_backward(act, grad, in, out);
  } else if (act.kind == ActKind::clamped_swiglu) {
    clamped_backward(act, grad, in, out);
  } else {
    gate_backward(act.kind, grad, in, out);
  }
  return dx;
}

ActivationColumnSums activation_backward_column_sums(const Act& act, const at::Tensor& dy, const at::Tensor& x) {
  auto dx = ref::activation_backward(act, dy, x);
  const auto width = dx.dim() == 0 ? 1 : dx.size(-1);
  const auto matrix = dx.reshape({dx.numel() / std::max<int64_t>(width, 1), width});
  auto sums = at::sum(matrix, 0, /*keepdim=*/false, at::toOpMathType(dx.scalar_type()));
  return {std::move(dx), std::move(sums)};
}

at::Tensor scaled_activation_forward(const Act& act, const at::Tensor& x, const at::Tensor& scales) {
  return as_dtype(unrounded(act, x).mul_(as_column(scales, x)), x.scalar_type());
}

std::pair<at::Tensor, at::Tensor> scaled_activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x,
                                                             const at::Tensor& scales, bool needs_dx, bool needs_ds) {
  at::Tensor dx, ds;
  if (needs_dx) dx = ref::activation_backward(act, at::mul(to_opmath(dy), as_column(scales, x)), x);
  if (needs_ds) {
    ds = at::sum(unrounded(act, x).mul_(dy), -1);
    ds = as_dtype(ds, scales.scalar_type()).reshape(scales.sizes());
  }
  return {dx, ds};
}

}  // namespace weft::kernels::ref
