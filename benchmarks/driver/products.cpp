// Single products: linear with bias and activation, bare GEMMs, weight gradients.
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "benchmarks/driver/problem.h"
#include "weft/kernels/gemm.h"
#include "weft/kernels/packing.h"

namespace bench {
namespace {

using at::Tensor;
using weft::kernels::Act;
using weft::kernels::ActKind;
using weft::kernels::gemm;

Tensor random(at::IntArrayRef sizes, at::ScalarType dtype, double scale = 1) {
  return at::randn(sizes).mul_(scale).to(dtype);
}

/// What happens to a weight before each use. warm: nothing, weft finds that out by itself. frozen: weft was told that
/// nothing will. cold: one value changes.
std::function<void()> weights(const Line& line, const Tensor& w) {
  const auto state = line.word("weights", "warm", {"warm", "frozen", "cold"});
  if (state == "frozen") weft::kernels::freeze(w);
  if (state != "cold") return [] {};
  return [w] { w.data_ptr<c10::BFloat16>()[0].x ^= 1; };
}

double flop(int64_t m, int64_t k, int64_t n) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(k) * static_cast<double>(n);
}

/// y = gelu(x Wᵀ + b); with pre=1 the argument of gelu is stored too.
Case linear_gelu(const Line& line) {
  const auto m = line.size("m"), k = line.size("k"), n = line.size("n");
  const auto dtype = line.dtype();
  const bool pre = line.word("pre", "0", {"0", "1"}) == "1";
  const auto x = random({m, k}, dtype), w = random({n, k}, dtype, 1 / std::sqrt(k)), b = random({n}, dtype);
  auto y = at::empty({m, n}, dtype);
  const auto change = weights(line, w);
  const auto run = [=] {
    change();
    return gemm(x, w.t(), {.bias = b, .act = Act{ActKind::gelu}, .keep_pre = pre, .weight = true});
  };
  const auto plain = [=](at::ScalarType t) {
    const auto v = at::linear(x.to(t), w.to(t), b.to(t));
    auto all = std::vector{at::gelu(v, "tanh")};
    if (pre) all.push_back(v);
    return all;
  };
  return {.sides = {{"weft", [=] { run(); }},
                    {"mm_out", [=]() mutable { at::mm_out(y, x, w.t()); }},
                    {"eager", [=] { plain(dtype); }}},
          .results = {"y", "pre"},
          .ours =
              [=] {
                auto r = run();
                return pre ? std::vector{r.out, r.pre} : std::vector{r.out};
              },
          .plain = plain,
          .dtype = dtype,
          .flop = flop(m, k, n)};
}

/// forward: y = x Wᵀ with W [n, k]. dgrad: y = x W with W [k, n].
Case bare_gemm(const Line& line) {
  const auto m = line.size("m"), k = line.size("k"), n = line.size("n");
  const auto dtype = line.dtype();
  const bool forward = line.word("form", "forward", {"forward", "dgrad"}) == "forward";
  const auto x = random({m, k}, dtype);
  const auto w = forward ? random({n, k}, dtype, 1 / std::sqrt(k)) : random({k, n}, dtype, 1 / std::sqrt(k));
  const auto b = forward ? w.t() : w;
  const auto ours = at::empty({m, n}, dtype);
  auto theirs = at::empty({m, n}, dtype);
  const auto change = weights(line, w);
  const auto run = [=] {
    change();
    return gemm(x, b, {.out = ours, .weight = true}).out;
  };
  return {.sides = {{"weft", [=] { run(); }}, {"mm", [=]() mutable { at::mm_out(theirs, x, b); }}},
          .results = {"y"},
          .ours =
              [=] {
                ours.fill_(std::nan(""));  // the call that is timed must write every value
                return std::vector{run().clone()};
              },
          .plain = [=](at::ScalarType t) { return std::vector{at::mm(x.to(t), b.to(t))}; },
          .dtype = dtype,
          .flop = flop(m, k, n)};
}

/// G += dyᵀ x with dy [m, n], x [m, k], in the dtype of G.
Case wgrad(const Line& line) {
  const auto m = line.size("m"), n = line.size("n"), k = line.size("k");
  const auto dtype = line.dtype(), kept = line.dtype("grad", "fp32");
  const auto dy = random({m, n}, dtype, 1 / std::sqrt(m)), x = random({m, k}, dtype);
  const auto start = random({n, k}, kept), ours = start.clone(), eager = start.clone();
  auto product = at::empty({n, k}, dtype);
  return {.sides = {{"weft", [=] { gemm(dy.t(), x, {.add = ours, .out = ours}); }},
                    {"mm+add_",
                     [=]() mutable {
                       at::mm_out(product, dy.t(), x);
                       eager.add_(product);
                     }}},
          .results = {"main_grad"},
          .ours =
              [=] {
                const auto g = start.clone();
                return std::vector{gemm(dy.t(), x, {.add = g, .out = g}).out};
              },
          .plain =
              [=](at::ScalarType t) {
                const auto wide = t == dtype ? kept : t;
                return std::vector{at::add(start.to(wide), at::mm(dy.t().to(t), x.to(t)))};
              },
          .dtype = dtype,
          .flop = flop(m, k, n)};
}

}  // namespace

std::vector<Kind> product_kinds() {
  return {{"linear_gelu", "m= k= n= dtype=bf16|fp16|fp32 pre=0|1 weights=warm|frozen|cold", linear_gelu},
          {"gemm", "m= k= n= dtype= form=forward|dgrad weights=warm|frozen|cold", bare_gemm},
          {"wgrad", "m= n= k= dtype= grad=fp32|bf16|fp16", wgrad}};
}

}  // namespace bench
