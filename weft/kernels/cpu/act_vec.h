#pragma once
#include <ATen/cpu/vec/vec.h>

#include <type_traits>
#include <utility>

#include "weft/kernels/activation.h"
#include "weft/kernels/cpu/io_vec.h"

// The activations of kernels/activation.h on float32 vectors. Large finite arguments give the limit of the function to
// within 1e-33. Infinite arguments give what the formula gives, as in eager PyTorch: x·σ(x) is NaN at -inf, and its
// derivative is NaN at ±inf. NaN gives NaN.

namespace weft::kernels::CPU_CAPABILITY {

/// The precision of an activation.
enum class ActPrecision {
  float32,   // about 2 ulp
  bfloat16,  // relative error 2^-13, 1/16 of half a bfloat16 ulp. For results stored as bfloat16; AVX-512 only
};

// ---- Elementary functions ----------------------------------------------------------------------------------------

/// 2^f for 0 ≤ f ≤ 1: minimax polynomial in relative error, 2.6e-6 for bfloat16.
template <ActPrecision kPrecision>
Vec exp2_fraction(const Vec& f) {
  if constexpr (kPrecision == ActPrecision::bfloat16) {
    Vec p = fma(Vec(1.3534168e-2F), f, Vec(5.2011464e-2F));
    p = fma(p, f, Vec(2.4144275e-1F));
    p = fma(p, f, Vec(6.9300383e-1F));
    return fma(p, f, Vec(1.0000026F));
  }
  Vec p = fma(Vec(2.161291631637141e-4F), f, Vec(1.2467845808714628e-3F));
  p = fma(p, f, Vec(9.675451554358006e-3F));
  p = fma(p, f, Vec(5.5485282093286514e-2F));
  p = fma(p, f, Vec(2.402293086051941e-1F));
  p = fma(p, f, Vec(6.931470632553101e-1F));
  return fma(p, f, Vec(1.F));
}

/// 2^(floor(t) + f) for |t| ≤ 126, on AVX-512 for any t; f is the fraction of t, optionally corrected.
template <ActPrecision kPrecision>
Vec exp2(const Vec& t, const Vec& f) {
  return multiply_exp2(exp2_fraction<kPrecision>(f), t);
}

/// e^(-x) for |x| ≤ kExpBound; for bfloat16 any x.
inline constexpr float kExpBound = 87;
template <ActPrecision kPrecision>
Vec exp_neg(const Vec& x) {
  if constexpr (kPrecision == ActPrecision::bfloat16) {
    const Vec t = x * Vec(-1.44269504F);
    return exp2<kPrecision>(t, fraction(t));
  }
  const Vec high(-1.44269502162933349609375F), low(-1.92596299112661746887e-8F);  // their sum is -log2(e)
  const Vec t = x * high;
  const Vec lost = fma(x, low, at::vec::fmsub(x, high, t));
  return exp2<kPrecision>(t, fraction(t) + lost);
}

/// 1/d for 1 ≤ d ≤ 2^126; for bfloat16 up to inf.
template <ActPrecision kPrecision>
Vec reciprocal(const Vec& d) {
  if constexpr (kPrecision == ActPrecision::bfloat16) {
    return approximate_reciprocal(d);
  } else {
    return exact_reciprocal(d);
  }
}

/// s = σ(x) and c = 1 - σ(x), both to full relative precision, from e = e^(-x).
template <ActPrecision kPrecision>
struct Sigmoid {
  Vec s, c;
  explicit Sigmoid(const Vec& e) : s(reciprocal<kPrecision>(Vec(1.F) + e)), c(e * s) {}
};

inline Vec clamp_low(const Vec& x, float low) { return at::vec::clamp_min(x, Vec(low)); }
inline Vec clamp_high(const Vec& x, float high) { return at::vec::clamp_max(x, Vec(high)); }
/// `v` where `test` holds, else 0.
inline Vec keep_where(const Vec& test, const Vec& v) { return test & v; }

/// v, or NaN where x is infinite or NaN.
inline Vec nan_at_inf(const Vec& x, const Vec& v) { return fma(x, Vec(0.F), v); }
/// v, or NaN where x is -inf or NaN.
inline Vec nan_at_minus_inf(const Vec& x, const Vec& v) { return nan_at_inf(clamp_high(x, 0), v); }

/// A function and its derivative at the same point.
struct ValueAndGrad {
  Vec value, grad;
};

/// tanh. With e = e^(-2|z|): tanh = ±(1 - e)/(1 + e), tanh' = 4e/(1 + e)²; near 0 an odd polynomial.
inline ValueAndGrad tanh(const Vec& z) {
  const Vec sign = z & Vec(-0.F), size = z.abs();
  const Vec e = exp_neg<ActPrecision::float32>(clamp_high(size + size, 40.F)),
            r = reciprocal<ActPrecision::float32>(Vec(1.F) + e);
  const Vec z2 = z * z;
  Vec p = fma(Vec(-5.70498872745e-3F), z2, Vec(2.06390887954e-2F));
  p = fma(p, z2, Vec(-5.37397155531e-2F));
  p = fma(p, z2, Vec(1.33314422036e-1F));
  p = fma(p, z2, Vec(-3.33332819422e-1F));
  const Vec small = fma(p * z2, z, z), large = ((Vec(1.F) - e) * r) | sign;
  return {Vec::blendv(large, small, size < Vec(0.625F)), Vec(4.F) * e * r * r};
}

// ---- f and h of each kind ----------------------------------------------------------------------------------------

/// The parameters of an Act in float32.
struct ActParams {
  float limit, alpha, offset, beta1, beta2, per_beta1, per_beta2;
  explicit ActParams(const Act& act)
      : limit(static_cast<float>(act.limit)),
        alpha(static_cast<float>(act.alpha)),
        offset(static_cast<float>(act.offset)),
        beta1(static_cast<float>(act.beta1)),
        beta2(static_cast<float>(act.beta2)),
        per_beta1(static_cast<float>(1 / act.beta1)),
        per_beta2(static_cast<float>(1 / act.beta2)) {}
};

constexpr bool is_gated(ActKind kind) { return kind >= ActKind::glu; }

/// Whether σ takes unclamped arguments. e^(-x) may then be 0 or inf, and x·σ(x) is still correct; the derivative, which
/// multiplies σ by 1 - σ, would not be.
template <ActPrecision kPrecision, bool kWithGrad>
constexpr bool kUnbounded = kPrecision == ActPrecision::bfloat16 && !kWithGrad;

/// x·σ(kx) = x·s; the derivative is s·(1 + kx·c).
template <ActPrecision kPrecision, bool kWithGrad>
ValueAndGrad swish(const Vec& x, float k) {
  const Vec z = k == 1 ? x : x * Vec(k);
  const Vec bounded = kUnbounded<kPrecision, kWithGrad> ? z : clamp_high(clamp_low(z, -kExpBound), kExpBound);
  const Sigmoid<kPrecision> sigma(exp_neg<kPrecision>(bounded));
  if constexpr (kUnbounded<kPrecision, kWithGrad>) return {x * sigma.s, Vec()};
  const Vec value = nan_at_minus_inf(x, clamp_low(x, -1e4F) * sigma.s);  // the clamped σ is not quite 0
  return {value, kWithGrad ? fma(bounded * sigma.c, sigma.s, nan_at_inf(x, sigma.s)) : Vec()};
}

/// x·σ(2u) with 2u = x·(q + r·x²), which is x·(½ + ½·tanh(u)); the derivative is s + x·s·c·(q + 3r·x²).
template <ActPrecision kPrecision, bool kWithGrad>
ValueAndGrad gelu(const Vec& x) {
  constexpr float kBound = 10;  // 2^(±126)
  constexpr double kLog2e = 1.4426950408889634, q = 1.5957691216057308, r = 0.07135481627260025;
  const Vec least = clamp_low(x, -kBound), bounded = kUnbounded<kPrecision, kWithGrad> ? x : clamp_high(least, kBound);
  const Vec x2 = bounded * bounded;
  const Vec t = bounded * fma(Vec(static_cast<float>(-kLog2e * r)), x2, Vec(static_cast<float>(-kLog2e * q)));
  const Sigmoid<kPrecision> sigma(exp2<kPrecision>(t, fraction(t)));
  if constexpr (kUnbounded<kPrecision, kWithGrad>) return {x * sigma.s, Vec()};
  const Vec value = nan_at_minus_inf(x, least * sigma.s);
  if constexpr (!kWithGrad) return {value, Vec()};
  const Vec du = fma(Vec(static_cast<float>(3 * r)), x2, Vec(static_cast<float>(q)));
  return {value, fma(bounded * sigma.c * du, sigma.s, nan_at_inf(x, sigma.s))};
}

/// x·Φ(x) with Φ(-|x|) = e^(-x²/2)·P(t), t = 1/(1 + 0.3·|x|), P minimax in relative error (6e-8); the derivative is
/// Φ(x) + x·φ(x), φ(x) = e^(-x²/2)/√(2π).
inline ValueAndGrad gelu_erf(const Vec& x) {
  constexpr float kBound = 13;  // e^(-x²/2) = 2^-122
  const Vec least = clamp_low(x, -kBound), bounded = clamp_high(least, kBound), half = bounded * Vec(0.5F);
  const Vec square = bounded * half, lost = at::vec::fmsub(bounded, half, square);  // their sum is x²/2
  const Vec rounded = exp_neg<ActPrecision::float32>(square), e = rounded - rounded * lost;
  const Vec t = reciprocal<ActPrecision::float32>(fma(bounded.abs(), Vec(0.3F), Vec(1.F)));
  Vec p = fma(Vec(3.8271498e-2F), t, Vec(-1.6864586e-1F));
  p = fma(p, t, Vec(2.2758259e-1F));
  p = fma(p, t, Vec(-7.527052e-2F));
  p = fma(p, t, Vec(1.4167896e-1F));
  p = fma(p, t, Vec(9.504981e-2F));
  p = fma(p, t, Vec(1.21826194e-1F));
  p = fma(p, t, Vec(1.1950096e-1F));
  const Vec tail = e * fma(p, t, Vec(6.3853477e-6F)), cdf = Vec::blendv(tail, Vec(1.F) - tail, x > Vec(0.F));
  return {nan_at_minus_inf(x, least * cdf), fma(bounded * Vec(0.39894228F), e, nan_at_inf(x, cdf))};
}

inline ValueAndGrad squared_relu(const Vec& x) {
  const Vec y = clamp_low(x, 0);
  return {y * y, y + y};
}

/// (β1·tanh(relu(x)/β1))².
inline ValueAndGrad tanh_squared_relu(const Vec& x, const ActParams& p) {
  const auto [t, dt] = tanh(clamp_low(x, 0) * Vec(p.per_beta1));
  const Vec y = Vec(p.beta1) * t;
  return {y * y, (y + y) * dt};
}

/// σ(x); exactly 0 or 1 beyond ±kExpBound.
template <ActPrecision kPrecision>
ValueAndGrad logistic(const Vec& x) {
  const Sigmoid<kPrecision> sigma(exp_neg<kPrecision>(clamp_high(clamp_low(x, -kExpBound), kExpBound)));
  const Vec s = Vec::blendv(sigma.s, Vec(0.F), x < Vec(-kExpBound)),
            c = Vec::blendv(sigma.c, Vec(0.F), x > Vec(kExpBound));
  return {s, s * c};
}

/// β1·tanh(a/β1)·σ(a).
inline ValueAndGrad situ(const Vec& a, const ActParams& p) {
  const auto [t, dt] = tanh(a * Vec(p.per_beta1));
  const auto [s, ds] = logistic<ActPrecision::float32>(a);
  const Vec bt = Vec(p.beta1) * t;
  return {bt * s, fma(dt, s, bt * ds)};
}

/// f(x) of a unary kind, or of the gate of a gated kind. `grad` is valid only if kWithGrad; for clamped_swiglu it is
/// the derivative at the clamped argument.
template <ActKind kKind, ActPrecision kPrecision, bool kWithGrad>
ValueAndGrad f_of(const Vec& x, const ActParams& p) {
  using enum ActKind;
  if constexpr (kKind == gelu || kKind == geglu) {
    return CPU_CAPABILITY::gelu<kPrecision, kWithGrad>(x);
  } else if constexpr (kKind == gelu_erf) {
    return CPU_CAPABILITY::gelu_erf(x);
  } else if constexpr (kKind == qgelu || kKind == qgeglu) {
    return swish<kPrecision, kWithGrad>(x, 1.702F);
  } else if constexpr (kKind == silu || kKind == swiglu) {
    return swish<kPrecision, kWithGrad>(x, 1);
  } else if constexpr (kKind == relu || kKind == reglu) {
    return {clamp_low(x, 0), Vec::blendv(Vec(1.F), Vec(0.F), x <= Vec(0.F))};
  } else if constexpr (kKind == srelu || kKind == sreglu) {
    return squared_relu(x);
  } else if constexpr (kKind == tanh_srelu) {
    return tanh_squared_relu(x, p);
  } else if constexpr (kKind == glu) {
    return logistic<kPrecision>(x);
  } else if constexpr (kKind == situglu) {
    return situ(x, p);
  } else {
    return swish<kPrecision, kWithGrad>(clamp_high(x, p.limit), p.alpha);
  }
}

/// h(b) of a gated kind. For clamped_swiglu `grad` is a lane mask.
template <ActKind kKind>
ValueAndGrad h_of(const Vec& b, const ActParams& p) {
  if constexpr (kKind == ActKind::situglu) {
    const auto [t, dt] = tanh(b * Vec(p.per_beta2));
    return {Vec(p.beta2) * t, dt};
  } else if constexpr (kKind == ActKind::clamped_swiglu) {
    const Vec inside = clamp_high(clamp_low(b, -p.limit), p.limit);
    return {inside + Vec(p.offset), inside == b};
  } else {
    return {b, Vec(1.F)};
  }
}

// ---- What kernels call -------------------------------------------------------------------------------------------

/// f(x) of a unary kind.
template <ActKind kKind, ActPrecision kPrecision = ActPrecision::float32>
Vec act_value(const Vec& x, const ActParams& p) {
  return f_of<kKind, kPrecision, false>(x, p).value;
}
/// f(x) and f'(x) of a unary kind.
template <ActKind kKind, ActPrecision kPrecision = ActPrecision::float32>
ValueAndGrad act_value_and_grad(const Vec& x, const ActParams& p) {
  return f_of<kKind, kPrecision, true>(x, p);
}
/// f(a)·h(b) of a gated kind.
template <ActKind kKind, ActPrecision kPrecision = ActPrecision::float32>
Vec gated_value(const Vec& a, const Vec& b, const ActParams& p) {
  return f_of<kKind, kPrecision, false>(a, p).value * h_of<kKind>(b, p).value;
}
/// f(a)·h(b), da = dy·f'(a)·h(b) and db = dy·f(a)·h'(b) of a gated kind.
struct GatedGrads {
  Vec value, da, db;
};
template <ActKind kKind, ActPrecision kPrecision = ActPrecision::float32>
GatedGrads gated_value_and_grads(const Vec& dy, const Vec& a, const Vec& b, const ActParams& p) {
  const auto f = f_of<kKind, kPrecision, true>(a, p), h = h_of<kKind>(b, p);
  if constexpr (kKind == ActKind::clamped_swiglu)  // a clamp stops every gradient, including NaN
    return {f.value * h.value, keep_where(a <= Vec(p.limit), dy * h.value * f.grad), keep_where(h.grad, dy * f.value)};
  constexpr bool kPlain = kKind != ActKind::situglu;  // h' = 1
  return {f.value * h.value, dy * h.value * f.grad, kPlain ? dy * f.value : dy * f.value * h.grad};
}

/// Calls run(std::integral_constant<ActKind, kind>{}), turning a run-time kind into a template argument.
template <class F>
void with_kind(ActKind kind, F&& run) {
  constexpr auto kKinds = static_cast<int>(ActKind::clamped_swiglu) + 1;
  [&]<int... kKind>(std::integer_sequence<int, kKind...>) {
    (void)((kind == ActKind{kKind} && (run(std::integral_constant<ActKind, ActKind{kKind}>{}), true)) || ...);
  }(std::make_integer_sequence<int, kKinds>{});
}

}  // namespace weft::kernels::CPU_CAPABILITY
