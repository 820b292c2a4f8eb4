// Grouped GEMMs: one weight per group of rows.
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <numeric>

#include "benchmarks/driver/problem.h"
#include "weft/kernels/grouped.h"

namespace bench {
namespace {

using at::Tensor;
using weft::kernels::grouped_gemm;
using weft::kernels::grouped_weight_gradient;
using weft::kernels::GroupedMatrix;
using weft::kernels::GroupIndex;

Tensor random(at::IntArrayRef sizes, at::ScalarType dtype, double scale = 1) {
  return at::randn(sizes).mul_(scale).to(dtype);
}

/// Splits `rows` over the groups. even: equally. zipf: in proportion to 1/(g + 1). one: all in the first group.
std::vector<int64_t> split(const std::string& kind, int64_t groups, int64_t rows) {
  std::vector<double> share(groups);
  for (int64_t g = 0; g < groups; ++g)
    share[g] = kind == "even" ? 1 : kind == "zipf" ? 1 / (1.0 + static_cast<double>(g)) : g == 0 ? 1 : 0;
  const double all = std::accumulate(share.begin(), share.end(), 0.0);
  std::vector<int64_t> out(groups);
  double sum = 0;
  int64_t given = 0;
  for (int64_t g = 0; g < groups; ++g) {
    sum += share[g];
    out[g] = std::llround(sum / all * static_cast<double>(rows)) - given;
    given += out[g];
  }
  return out;
}

/// Tensors of a problem, and access to the rows of each group.
struct Groups {
  std::vector<int64_t> splits;
  Tensor index, offsets, x, dy, w;

  Groups(const Line& line, int64_t groups, int64_t rows, int64_t n, int64_t k)
      : splits(split(line.word("splits", "even", {"even", "zipf", "one"}), groups, rows)) {
    const auto dtype = line.dtype();
    index = at::tensor(splits, at::kLong);
    offsets = index.cumsum(0).to(at::kInt);
    x = random({rows, k}, dtype);
    dy = random({rows, n}, dtype);
    w = random({groups, n, k}, dtype, 1 / std::sqrt(k));
  }
  /// Calls run(g, function that selects the rows of group g) for each group that has rows.
  template <class Fn>
  void each(const Fn& run) const {
    int64_t row = 0;
    for (size_t g = 0; g < splits.size(); row += splits[g++])
      if (splits[g] > 0)
        run(static_cast<int64_t>(g), [row, count = splits[g]](const Tensor& t) { return t.narrow(0, row, count); });
  }
};

/// The sides of y = x Wᵀ, or with `data` of dx = dy W.
Case rows_case(const Groups& p, bool data, const Tensor& ours) {
  const auto& x = data ? p.dy : p.x;
  const auto factor = data ? p.w : p.w.transpose(1, 2);
  const auto dense = factor[0];
  auto theirs = at::empty_like(ours), loop = at::empty_like(ours);
  const auto run = [=] { grouped_gemm(GroupIndex(p.index), x, GroupedMatrix(p.w), !data, {.out = ours}); };
  const auto by_loop = [=](const Tensor& out, at::ScalarType t) {
    p.each([&](int64_t g, const auto& part) {
      auto y = part(out);
      at::mm_out(y, part(x).to(t), factor[g].to(t));
    });
  };
  Case out;
  out.sides = {{"weft", run},
               {"mm", [=]() mutable { at::mm_out(theirs, x, dense); }},
               {"loop", [=] { by_loop(loop, x.scalar_type()); }},
               {"grouped_mm", [=] { at::_grouped_mm(x, factor, p.offsets); }}};
  out.ours = [=] {
    ours.fill_(std::nan(""));  // the timed call must write every value
    run();
    return std::vector{ours.clone()};
  };
  out.plain = [=](at::ScalarType t) {
    auto y = at::empty(ours.sizes(), t);
    by_loop(y, t);
    return std::vector{y};
  };
  return out;
}

/// The sides of G += dyᵀ x for each group, in the dtype of G.
Case gradient_case(const Groups& p, const Tensor& start) {
  const auto ours = start.clone(), eager = start.clone();
  auto product = at::empty(start.sizes(), p.x.scalar_type()), theirs = at::empty(start[0].sizes(), p.x.scalar_type());
  const auto add = [=](const Tensor& to) {
    grouped_weight_gradient(GroupIndex(p.index), p.dy, p.x, GroupedMatrix(to), true);
  };
  const auto by_loop = [=](const Tensor& to, at::ScalarType t) {
    p.each([&](int64_t g, const auto& part) { to[g].add_(at::mm(part(p.dy).t().to(t), part(p.x).to(t))); });
  };
  Case out;
  out.sides = {{"weft", [=] { add(ours); }},
               {"mm", [=]() mutable { at::mm_out(theirs, p.dy.t(), p.x); }},
               {"loop", [=] { by_loop(eager, p.x.scalar_type()); }},
               {"grouped_mm", [=]() mutable { eager.add_(at::_grouped_mm(p.dy.t(), p.x, p.offsets)); }}};
  out.ours = [=] {
    const auto g = start.clone();
    add(g);
    return std::vector{g};
  };
  out.plain = [=](at::ScalarType t) {
    auto g = start.to(t == p.x.scalar_type() ? start.scalar_type() : t).clone();
    by_loop(g, t);
    return std::vector{g};
  };
  return out;
}

Case grouped(const Line& line) {
  const auto groups = line.size("groups"), rows = line.size("rows"), n = line.size("n"), k = line.size("k");
  const auto form = line.word("form", "forward", {"forward", "dgrad", "wgrad"});
  const auto grad_dtype = line.dtype("grad", "fp32");
  const Groups p(line, groups, rows, n, k);
  const auto dtype = p.x.scalar_type();
  auto out = form == "wgrad" ? gradient_case(p, random({groups, n, k}, grad_dtype))
                             : rows_case(p, form == "dgrad", at::empty({rows, form == "dgrad" ? k : n}, dtype));
  out.results = {form == "forward" ? "y" : form == "dgrad" ? "dx" : "main_grad"};
  out.dtype = dtype;
  out.flop = 2.0 * static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k);
  return out;
}

}  // namespace

std::vector<Kind> grouped_kinds() {
  return {{"grouped", "groups= rows= n= k= splits=even|zipf|one form=forward|dgrad|wgrad dtype= grad=fp32|bf16|fp16",
           grouped}};
}

}  // namespace bench
