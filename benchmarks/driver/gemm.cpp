// Single GEMMs: linear with bias and activation, plain GEMMs, weight gradients.
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "benchmarks/driver/problem.h"
#include "weft/kernels/gemm.h"
#include "weft/kernels/packing.h"
#include "weft/kernels/row_chunks.h"

namespace bench {
namespace {

using at::Tensor;
using weft::kernels::Act;
using weft::kernels::ActKind;
using weft::kernels::gemm;
using weft::kernels::transposed;

Tensor random(at::IntArrayRef sizes, at::ScalarType dtype, double scale = 1) {
  return at::randn(sizes).mul_(scale).to(dtype);
}

/// weights=frozen: the packed copy is kept between calls.
void freeze_if_requested(const Line& line, const Tensor& w) {
  if (line.word("weights", "packed", {"packed", "frozen"}) == "frozen") weft::kernels::freeze(w);
}

double flop(int64_t m, int64_t k, int64_t n) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(k) * static_cast<double>(n);
}

/// y = gelu(x Wᵀ + b); with pre=1 the pre-activation is stored too.
Case linear_gelu(const Line& line) {
  const auto m = line.size("m"), k = line.size("k"), n = line.size("n");
  const auto dtype = line.dtype();
  const bool pre = line.word("pre", "0", {"0", "1"}) == "1";
  const auto x = random({m, k}, dtype), w = random({n, k}, dtype, 1 / std::sqrt(k)), b = random({n}, dtype);
  auto y = at::empty({m, n}, dtype);
  freeze_if_requested(line, w);
  const auto run = [=] {
    return gemm(x, w.t(), {.bias = b, .act = Act{ActKind::gelu}, .keep_pre_act = pre, .b_is_weight = true});
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
                return pre ? std::vector{r.out, r.pre_act} : std::vector{r.out};
              },
          .plain = plain,
          .dtype = dtype,
          .flop = flop(m, k, n)};
}

/// forward: y = x Wᵀ with W [n, k]. dgrad: y = x W with W [k, n].
Case plain_gemm(const Line& line) {
  const auto m = line.size("m"), k = line.size("k"), n = line.size("n");
  const auto dtype = line.dtype();
  const bool forward = line.word("form", "forward", {"forward", "dgrad"}) == "forward";
  const auto x = random({m, k}, dtype);
  const auto w = forward ? random({n, k}, dtype, 1 / std::sqrt(k)) : random({k, n}, dtype, 1 / std::sqrt(k));
  const auto b = forward ? w.t() : w;
  const auto ours = at::empty({m, n}, dtype);
  auto theirs = at::empty({m, n}, dtype);
  freeze_if_requested(line, w);
  const auto run = [=] { return gemm(x, b, {.out = ours, .b_is_weight = true}).out; };
  return {.sides = {{"weft", [=] { run(); }}, {"mm", [=]() mutable { at::mm_out(theirs, x, b); }}},
          .results = {"y"},
          .ours =
              [=] {
                ours.fill_(std::nan(""));  // the timed call must write every value
                return std::vector{run().clone()};
              },
          .plain = [=](at::ScalarType t) { return std::vector{at::mm(x.to(t), b.to(t))}; },
          .dtype = dtype,
          .flop = flop(m, k, n)};
}

/// G += dyᵀ x with dy [m, n], x [m, k], in the dtype of G. packed=1: dy is already packed.
Case wgrad(const Line& line) {
  const auto m = line.size("m"), n = line.size("n"), k = line.size("k");
  const bool packed = line.word("packed", "0", {"0", "1"}) == "1";
  const auto dtype = line.dtype(), grad_dtype = line.dtype("grad", "fp32");
  const auto dy = random({m, n}, dtype, 1 / std::sqrt(m)), x = random({m, k}, dtype);
  const auto start = random({n, k}, grad_dtype), ours = start.clone(), eager = start.clone();
  auto product = at::empty({n, k}, dtype);
  Tensor packed_dy;
  if (packed) {
    packed_dy = at::empty({(n + 31) / 32, 2 * ((m + 31) / 32), 16, 32}, dtype);
    weft::kernels::pack_rows(dy.t().contiguous(), packed_dy);
  }
  const auto into = [=](const Tensor& g) { return gemm(transposed(dy, packed_dy), x, {.addend = g, .out = g}).out; };
  return {.sides = {{"weft", [=] { into(ours); }},
                    {"mm+add_",
                     [=]() mutable {
                       at::mm_out(product, dy.t(), x);
                       eager.add_(product);
                     }}},
          .results = {"main_grad"},
          .ours =
              [=] {
                const auto g = start.clone();
                return std::vector{into(g)};
              },
          .plain =
              [=](at::ScalarType t) {
                const auto sum_dtype = t == dtype ? grad_dtype : t;
                return std::vector{at::add(start.to(sum_dtype), at::mm(dy.t().to(t), x.to(t)))};
              },
          .dtype = dtype,
          .flop = flop(m, k, n)};
}

/// dp = (dy W)·gelu'(p), then G += dpᵀ x, with dy [m, h], W [h, f], x [m, k]; dp is forwarded packed, or not.
Case packed_forwarding(const Line& line) {
  const auto m = line.size("m"), h = line.size("h"), f = line.size("f"), k = line.size("k");
  const auto dy = random({m, h}, at::kBFloat16, 1 / std::sqrt(m)), w = random({h, f}, at::kBFloat16, 1 / std::sqrt(h));
  const auto p = random({m, f}, at::kBFloat16), x = random({m, k}, at::kBFloat16);
  const auto start = random({f, k}, at::kFloat), ours = start.clone();
  const auto run = [=](const Tensor& g, bool forward_packed) {
    const auto dp = gemm(dy, w,
                         {.act_grad = Act{ActKind::gelu},
                          .act_input = p,
                          .keep_column_sums = true,
                          .keep_packed_transpose = forward_packed,
                          .b_is_weight = true});
    gemm(transposed(dp.out, dp.packed_transpose), x, {.addend = g, .out = g});
    return dp;
  };
  return {.sides = {{"weft", [=] { run(ours, true); }}, {"without tiles", [=] { run(ours, false); }}},
          .results = {"dp", "sums", "main_grad"},
          .ours =
              [=] {
                const auto g = start.clone();
                const auto dp = run(g, true);
                return std::vector{dp.out, dp.column_sums, g};
              },
          .plain =
              [=](at::ScalarType t) {
                const auto dp = at::gelu_backward(at::mm(dy.to(t), w.to(t)), p.to(t), "tanh");
                return std::vector{dp, dp.sum(0), at::add(start.to(t), at::mm(dp.t(), x.to(t)))};
              },
          .dtype = at::kBFloat16,
          .flop = flop(m, h, f) + flop(m, f, k)};
}

}  // namespace

std::vector<Kind> gemm_kinds() {
  return {{"linear_gelu", "m= k= n= dtype=bf16|fp16|fp32 pre=0|1 weights=packed|frozen", linear_gelu},
          {"gemm", "m= k= n= dtype= form=forward|dgrad weights=packed|frozen", plain_gemm},
          {"wgrad", "m= n= k= dtype= grad=fp32|bf16|fp16 packed=0|1", wgrad},
          {"packed_forwarding", "m= h= f= k=", packed_forwarding}};
}

}  // namespace bench
