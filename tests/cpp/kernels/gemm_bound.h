#pragma once
#include <ATen/TensorOperators.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "weft/kernels/gemm.h"
#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

// The contract of a GEMM as an error bound for each element: float32 accumulation, the error of the epilogue, one
// rounding at the store. Values and bounds are computed in float64. A matrix norm would let a few wrong elements pass.

namespace weft::kernels {

inline at::Tensor random(at::IntArrayRef sizes, at::ScalarType dtype = at::kBFloat16) {
  return at::randn(sizes).to(dtype);
}

/// A float64 value and its error bound, before the rounding of the store.
struct Bounded {
  at::Tensor value, error;
  bool defined() const { return value.defined(); }
};

/// Unit roundoff: half a unit in the last place of 1.
inline double roundoff(at::ScalarType dtype) {
  if (dtype == at::kDouble) return 0x1p-53;
  if (dtype == at::kFloat) return 0x1p-24;
  return dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
}
/// Absolute error of a store near 0: subnormal results may be flushed; float16 subnormals are rounded.
inline double underflow(at::ScalarType dtype) {
  return dtype == at::kDouble ? 0 : dtype == at::kHalf ? 0x1p-25 : 0x1p-126;
}

/// Error of a sum of `terms` terms relative to the sum of their magnitudes, accumulated in the opmath dtype of `dtype`
/// in any order: γ = terms·u, or 8·√terms·u from 64 terms on, which independent rounding errors exceed with probability
/// 2·e⁻³² (Higham and Mary 2019, λ = 8).
inline double summation(int64_t terms, at::ScalarType dtype) {
  const auto n = static_cast<double>(terms);
  return roundoff(at::toOpMathType(dtype)) * (1 + std::min(n, 8 * std::sqrt(n)));
}

inline at::Tensor in_float64(const at::Tensor& t) { return t.defined() ? t.to(at::kDouble) : t; }

inline Bounded bounded_gemm(const at::Tensor& a, const at::Tensor& b) {
  const auto x = in_float64(a), y = in_float64(b);
  return {at::mm(x, y), at::mm(x.abs(), y.abs()) * summation(a.size(1), a.scalar_type())};
}
/// x rounded to `dtype`.
inline Bounded rounded(const Bounded& x, at::ScalarType dtype) {
  return {x.value, x.error + (x.value.abs() + x.error) * roundoff(dtype) + underflow(dtype)};
}
/// scale·x + t, each operation rounded to the opmath dtype of `dtype`.
inline Bounded scaled_sum(const Bounded& x, double scale, const at::Tensor& t, at::ScalarType dtype) {
  const auto u = roundoff(at::toOpMathType(dtype));
  auto value = x.value * scale;
  auto error = x.error * std::abs(scale) + value.abs() * u;
  if (t.defined()) {
    const auto addend = in_float64(t);
    error = error + (value.abs() + addend.abs()) * u;
    value = value + addend;
  }
  return {value, error};
}
/// Σ_rows x.
inline Bounded bounded_column_sums(const Bounded& x, at::ScalarType dtype) {
  return {x.value.sum(0), x.error.sum(0) + x.value.abs().sum(0) * summation(x.value.size(0), dtype)};
}

/// Error of an activation: relative to its value, and relative to the magnitude of its argument.
struct ActError {
  double relative, absolute;
};
/// 2⁻¹³ in the AMX tier, 2e-6 elsewhere. The tails of ATen's GELU are less accurate: 1 + tanh cancels, in float64 too.
inline ActError act_error(Tier tier, at::ScalarType dtype) {
  if (dtype == at::kDouble) return {1e-13, 1e-13};
  if (tier == Tier::amx) return {0x1p-13, 1e-10};
  return {2e-6, tier == Tier::ref ? 1e-6 : 1e-10};
}

/// A view of x as [..., blocks, 2, size], which separates the columns of a and of b.
inline at::Tensor split_halves(const Act& act, const at::Tensor& x) {
  const auto half = x.size(-1) / 2, size = act.interleave > 0 ? act.interleave : half;
  return x.unflatten(-1, {size == 0 ? 1 : half / size, 2, size});
}

/// The magnitude of the argument: 1 + |x|, or (1 + |a|)·(1 + |b|) for a gated kind.
inline at::Tensor argument_size(const Act& act, const at::Tensor& x) {
  if (!act.gated()) return x.abs() + 1;
  const auto halves = split_halves(act, x.abs() + 1);
  return (halves.select(-2, 0) * halves.select(-2, 1)).flatten(-2);
}

/// act(x): propagates the error of x, evaluated at the corners of the box around x, and adds that of the activation.
inline Bounded activated(const Act& act, const Bounded& x, const ActError& own) {
  const auto y = activation_forward(act, x.value);
  const auto error = y.abs() * own.relative + argument_size(act, x.value) * own.absolute;
  auto moved = at::zeros_like(y);
  for (const bool opposite : {false, true}) {
    auto step = x.error.clone();
    if (opposite && act.gated()) split_halves(act, step).select(-2, 1).neg_();
    for (const double sign : {1., -1.})
      moved = at::maximum(moved, (activation_forward(act, x.value + step * sign) - y).abs());
  }
  return {y, error + moved * 1.01};
}

/// v·act'(act_input). The terms of a derivative may cancel, so its error is relative to the larger term, which is below
/// 1.2, times h(b) for a gated kind.
inline Bounded times_act_grad(const Act& act, const Bounded& v, const at::Tensor& act_input, const ActError& own) {
  const auto x = in_float64(act_input);
  const auto value = activation_backward(act, v.value, x);
  auto error = activation_backward(act, v.error, x).abs() + value.abs() * (own.relative + own.absolute);
  const auto size = v.value.abs() * (1.2 * (own.relative + own.absolute));
  if (act.gated()) {
    const auto b = split_halves(act, x).select(-2, 1);
    split_halves(act, error).select(-2, 0).add_(size.view(b.sizes()) * (1 + b.abs()));
    split_halves(act, error).select(-2, 1).add_(v.value.abs().view(b.sizes()) * own.absolute);
  } else {
    error = error + size;
  }
  return {value, error};
}

/// Where a tier rounds to the dtype of A before the store.
struct Roundings {
  bool product = false;  // scale·P + bias
  bool steps = false;    // after each step of the epilogue
};
/// The AMX tier, small GEMMs, and float32 results that are written or accumulated with a plain epilogue have no
/// intermediate rounding. Otherwise ATen rounds the GEMM, and the `ref` tier rounds after each step.
inline Roundings roundings(Tier tier, const Matrix& a, const Matrix& b, const Epilogue& e) {
  if (tier == Tier::amx || !at::isReducedFloatingType(a.t.scalar_type())) return {};
  if (tier != Tier::ref && gemm_is_small(a.rows(), b.columns(), b.rows())) return {};
  const bool plain = !e.act && !e.act_grad && !e.keep_pre_act && !e.keep_column_sums && !e.bias.defined();
  const bool accumulates = !e.addend.defined() || e.addend.is_same(e.out);
  if (plain && accumulates && e.out.defined() && e.out.scalar_type() == at::kFloat) return {};
  return {true, tier == Tier::ref};
}

/// The expected results of gemm() in `tier`; results that it does not return are undefined. Construct it before gemm()
/// overwrites `e.addend`.
struct BoundedGemm {
  Bounded out, pre_act, act_output, column_sums;

  BoundedGemm(Tier tier, const Matrix& a, const Matrix& b, const Epilogue& e) {
    const auto dtype = a.t.scalar_type();
    const auto [product, steps] = roundings(tier, a, b, e);
    const auto own = act_error(tier, dtype);
    const auto step = [&, steps = steps](const Bounded& x) { return steps ? rounded(x, dtype) : x; };
    auto v = scaled_sum(bounded_gemm(a.tensor(), b.tensor()), e.scale, e.bias, dtype);
    if (product) {
      v = rounded(v, dtype);
      if (e.bias.defined()) v.error = v.error + in_float64(e.bias).abs() * roundoff(dtype);
    }
    if (e.keep_pre_act) pre_act = v;
    if (e.act) v = step(activated(*e.act, v, own));
    if (e.act_grad) {
      const Bounded x{in_float64(e.act_input), at::zeros_like(in_float64(e.act_input))};
      if (e.keep_act_output) act_output = activated(*e.act_grad, x, own);
      v = step(times_act_grad(*e.act_grad, v, e.act_input, own));
    }
    if (e.keep_column_sums) column_sums = bounded_column_sums(v, dtype);
    if (e.addend.defined()) v = step(scaled_sum(v, 1, e.addend, dtype));
    out = v;
  }
};

/// Empty if every element of `got` is within the bound plus one rounding to its dtype; otherwise says what is wrong.
inline std::string mismatch(const at::Tensor& got, const Bounded& want) {
  if (got.defined() != want.defined()) return want.defined() ? "is missing" : "is not expected";
  if (!got.defined()) return {};
  if (got.sizes() != want.value.sizes()) return c10::str("has shape ", got.sizes(), ", expected ", want.value.sizes());
  if (got.numel() == 0) return {};
  const auto bound = rounded(want, got.scalar_type()).error.reshape({-1});
  const auto off = (in_float64(got) - want.value).abs().reshape({-1});
  const auto wrong = at::logical_not(off <= bound);  // NaN is wrong
  const auto count = wrong.sum().item<int64_t>();
  if (count == 0) return {};
  const auto first = wrong.to(at::kInt).argmax().item<int64_t>();
  const auto columns = std::max<int64_t>(1, got.size(-1));
  const auto value_at = [&](const at::Tensor& t) { return t.reshape({-1})[first].item<double>(); };
  return c10::str(count, " of ", got.numel(), " elements are wrong, the first in row ", first / columns, ", column ",
                  first % columns, ": got ", value_at(got), ", expected ", value_at(want.value), " within ",
                  value_at(bound));
}

inline void expect_within(const at::Tensor& got, const Bounded& want, const std::string& what) {
  const auto text = mismatch(got, want);
  EXPECT_TRUE(text.empty()) << what << " " << text;
}

/// All results of a GEMM.
inline void expect_within(const GemmResult& got, const BoundedGemm& want, const std::string& what) {
  expect_within(got.out, want.out, what + ", out");
  expect_within(got.pre_act, want.pre_act, what + ", pre_act");
  expect_within(got.act_output, want.act_output, what + ", act_output");
  expect_within(got.column_sums, want.column_sums, what + ", column_sums");
}

}  // namespace weft::kernels
