// y = x + W2 act(W1 rms_norm(x) + b1) + b2, forward and backward.
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/autograd.h>

#include "benchmarks/driver/problem.h"
#include "weft/nn/sequential.h"
#include "weft/ops/norm.h"

namespace bench {
namespace {

using at::Tensor;
using weft::nn::Linear;
using weft::nn::op;
using weft::nn::Sequential;

struct Sizes {
  int64_t m, h, f;
  bool gated;
  int64_t up() const { return gated ? 2 * f : f; }  // output columns of the first linear
};

Sequential make_block(const Sizes& s) {
  auto fork = op("MakeExtraOutput"), join = op("AddExtraInput");
  fork->set_extra_output_channel(0, "residual", /*output_to_caller=*/false);
  join->set_extra_input_channel(0, "residual");
  return Sequential(fork, op<weft::ops::RMSNorm>({.normalized_shape = {s.h}}), Linear(s.h, s.up()),
                    op(s.gated ? "SwiGLU" : "GELU"), Linear(s.f, s.h), join);
}

/// Parameters in the order γ, W1, b1, W2, b2.
Tensor plain_block(const Tensor& x, const std::vector<Tensor>& p, const Sizes& s) {
  const auto u = at::linear(at::rms_norm(x, {s.h}, p[0], 1e-5), p[1], p[2]);
  Tensor a;
  if (s.gated) {
    const auto halves = u.chunk(2, -1);
    a = at::silu(halves[0]) * halves[1];
  } else {
    a = at::gelu(u, "tanh");
  }
  return x + at::linear(a, p[3], p[4]);
}

/// Returns y and the gradients of x and the parameters.
template <class Forward>
std::vector<Tensor> with_gradients(const Forward& forward, const Tensor& x, const std::vector<Tensor>& params,
                                   const Tensor& dy) {
  const auto y = forward(x);
  std::vector<Tensor> inputs{x}, all{y};
  inputs.insert(inputs.end(), params.begin(), params.end());
  for (auto& g : torch::autograd::grad({y}, inputs, {dy})) all.push_back(g);
  return all;
}

/// Only the six GEMMs of forward and backward, into preallocated memory.
std::function<void()> six_gemms(const Sizes& s, at::ScalarType dtype) {
  const auto random = [&](int64_t rows, int64_t columns) { return at::randn({rows, columns}).to(dtype); };
  const auto x = random(s.m, s.h), a = random(s.m, s.f), dy = random(s.m, s.h), du = random(s.m, s.up());
  const auto w1 = random(s.up(), s.h), w2 = random(s.h, s.f);
  auto u = at::empty_like(du), y = at::empty_like(dy), da = at::empty_like(a), dx = at::empty_like(x);
  auto dw1 = at::empty_like(w1), dw2 = at::empty_like(w2);
  return [=]() mutable {
    at::mm_out(u, x, w1.t());
    at::mm_out(y, a, w2.t());
    at::mm_out(da, dy, w2);
    at::mm_out(dw2, dy.t(), a);
    at::mm_out(dx, du, w1);
    at::mm_out(dw1, du.t(), x);
  };
}

Case block(const Line& line) {
  const Sizes s{line.size("m"), line.size("h"), line.size("f"), line.word("act", "gelu", {"gelu", "swiglu"}) != "gelu"};
  const auto dtype = line.dtype();
  const auto module = make_block(s);
  module.ptr()->to(dtype);
  const auto params = module->parameters();
  const auto x = at::randn({s.m, s.h}).to(dtype).requires_grad_(), dy = at::randn({s.m, s.h}).to(dtype);

  const auto ours = [=] {
    return with_gradients([&](const Tensor& t) { return module.ptr()->forward(t); }, x, params, dy);
  };
  const auto plain = [=](at::ScalarType t) {
    std::vector<Tensor> twins;
    for (const auto& p : params) twins.push_back(p.detach().to(t).requires_grad_());
    return with_gradients([&](const Tensor& input) { return plain_block(input, twins, s); },
                          x.detach().to(t).requires_grad_(), twins, dy.to(t));
  };
  const auto flop = 6.0 * static_cast<double>(s.m) * static_cast<double>(s.h) * static_cast<double>(s.f + s.up());
  return {
      .sides = {{"weft", [=] { ours(); }},
                {"six mm_out", six_gemms(s, dtype)},
                {"eager",
                 [=] { with_gradients([&](const Tensor& t) { return plain_block(t, params, s); }, x, params, dy); }}},
      .results = {"y", "dx", "dgamma", "dw1", "db1", "dw2", "db2"},
      .ours = ours,
      .plain = plain,
      .dtype = dtype,
      .flop = flop};
}

}  // namespace

std::vector<Kind> block_kinds() { return {{"block", "m= h= f= act=gelu|swiglu dtype=", block}}; }

}  // namespace bench
