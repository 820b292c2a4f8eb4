#include <ATen/Parallel.h>

#include <algorithm>

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/operand.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

constexpr size_t kMost = 4096;          // values of a small factor
constexpr int64_t kTogether = 1 << 19;  // multiplications for which a second thread pays

char* at(void* data, int64_t value, at::ScalarType dtype) {
  return static_cast<char*>(data) + value * static_cast<int64_t>(c10::elementSize(dtype));
}
/// From a row of `t` on.
Rows rows_from(const at::Tensor& t, int64_t row) {
  if (!t.defined()) return {};
  const auto ld = t.strides()[0];
  return {at(const_cast<void*>(t.const_data_ptr()), row * ld, t.scalar_type()), ld, t.scalar_type()};
}
Rows rows_of(const GroupedMatrix& m, int64_t g) {
  if (!m.defined()) return {};
  return {m.data(g), m.columns(), m.dtype()};
}

/// run(g) for groups that are small, on several threads if that pays, then other(g) for the others, one by one.
template <class Small, class Run, class Other>
void each_group(int64_t groups, int64_t multiplications, const Small& small, const Run& run, const Other& other) {
  const auto some = [&](int64_t begin, int64_t end) {
    for (auto g = begin; g < end; ++g)
      if (small(g)) run(g);
  };
  if (multiplications <= 2 * kTogether)
    some(0, groups);
  else
    at::parallel_for(0, groups, std::max<int64_t>(1, groups * kTogether / multiplications), some);
  for (int64_t g = 0; g < groups; ++g)
    if (!small(g)) other(g);
}

/// Y = X Wᵀ or X W of a group of few values.
void small_group(Tier tier, const OpenIndex& index, const GroupedProduct& call, int64_t g) {
  const auto row = index.begin(g), k = call.x.sizes()[1], n = call.out.sizes()[1];
  const auto x = rows_from(call.x, row);
  const Strided a{x.data, index.rows(g), k, x.ld, 1};
  const Strided b{call.w.data(g), k, n, call.transposed ? 1 : n, call.transposed ? k : 1};
  alignas(64) float scratch[kMost];
  group_loops(tier).product(x.dtype, a, b, scratch,
                            {rows_from(call.out, row), rows_of(call.bias, g), rows_from(call.scales, row)});
}

/// dW (+)= dYᵀ X of a group of few values.
void small_group(Tier tier, const OpenIndex& index, const GroupedGradient& call, int64_t g) {
  const auto row = index.begin(g), rows = index.rows(g);
  const auto dy = rows_from(call.dy, row), x = rows_from(call.x, row);
  const Strided a{dy.data, call.out.rows(), rows, 1, dy.ld}, b{x.data, rows, call.out.columns(), x.ld, 1};
  alignas(64) float scratch[kMost];
  group_loops(tier).product(x.dtype, a, b, scratch, {rows_of(call.out, g), {}, {}, call.add});
}

}  // namespace

void grouped_rows(Tier tier, const OpenIndex& index, const GroupedProduct& call) {
  const auto k = call.x.sizes()[1], n = call.out.sizes()[1];
  each_group(
      index.groups(), index.active() * n * k, [&](int64_t g) { return gemm_is_small(index.rows(g), n, k); },
      [&](int64_t g) { small_group(tier, index, call, g); }, [&](int64_t g) { split_gemm(index, call, g); });
}

void grouped_rows(Tier tier, const OpenIndex& index, const GroupedGradient& call) {
  const auto n = call.out.rows(), k = call.out.columns();
  each_group(
      index.groups(), index.active() * n * k,
      [&](int64_t g) { return index.rows(g) > 0 && gemm_is_small(n, k, index.rows(g)); },
      [&](int64_t g) { small_group(tier, index, call, g); }, [&](int64_t g) { split_weight_gradient(index, call, g); });
}

void grouped_rows(Tier tier, const OpenIndex& index, const GroupedBiasSums& call) {
  const auto columns = call.dy.sizes()[1];
  const auto group = [&](int64_t g) {
    const auto row = index.begin(g);
    return GroupRows{index.rows(g), columns, rows_from(call.dy, row), rows_of(call.bias, g),
                     rows_from(call.scales, row)};
  };
  constexpr int64_t kColumns = 64;
  const auto parts = (columns + kColumns - 1) / kColumns;
  if (call.db.defined())
    in_rows(parts, (index.active() + index.groups()) * kColumns, [&](int64_t begin, int64_t end) {
      for (int64_t g = 0; g < index.groups(); ++g)
        group_loops(tier).sum_rows(group(g), rows_from(call.db, g), begin * kColumns,
                                   std::min(columns, end * kColumns));
    });
  if (call.ds.defined())
    in_rows(index.active(), columns, [&](int64_t begin, int64_t end) {
      for (int64_t g = 0; g < index.groups(); ++g) {
        const auto first = std::max(begin, index.begin(g)), last = std::min(end, index.end(g));
        float* ds = call.ds.mutable_data_ptr<float>() + index.begin(g);
        if (first < last) group_loops(tier).dot_bias(group(g), ds, first - index.begin(g), last - index.begin(g));
      }
    });
}

}  // namespace weft::kernels
