#include <ATen/Parallel.h>

#include <algorithm>

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

constexpr size_t kMaxSmallElems = 4096;                 // elements of B in a small GEMM, see gemm_is_small
constexpr int64_t kMultiplicationsPerThread = 1 << 19;  // work per thread from which a second thread pays

char* element_ptr(void* data, int64_t index, at::ScalarType dtype) {
  return static_cast<char*>(data) + index * static_cast<int64_t>(c10::elementSize(dtype));
}
/// A view of `t` from `row` on.
RowMajorView rows_from(const at::Tensor& t, int64_t row) {
  if (!t.defined()) return {};
  const auto ld = t.strides()[0];
  return {element_ptr(const_cast<void*>(t.const_data_ptr()), row * ld, t.scalar_type()), ld, t.scalar_type()};
}
RowMajorView rows_of(const GroupedMatrix& m, int64_t g) {
  if (!m.defined()) return {};
  return {m.data(g), m.columns(), m.dtype()};
}

/// Calls run(g) for small groups, in parallel if there is enough work, then other(g) for each remaining group.
template <class Small, class Fn, class Other>
void for_each_group(int64_t groups, int64_t multiplications, const Small& small, const Fn& run, const Other& other) {
  const auto run_range = [&](int64_t begin, int64_t end) {
    for (auto g = begin; g < end; ++g)
      if (small(g)) run(g);
  };
  if (multiplications <= 2 * kMultiplicationsPerThread)
    run_range(0, groups);
  else
    at::parallel_for(0, groups, std::max<int64_t>(1, groups * kMultiplicationsPerThread / multiplications), run_range);
  for (int64_t g = 0; g < groups; ++g)
    if (!small(g)) other(g);
}

/// Y = X Wᵀ or X W for a small group.
void small_group(Tier tier, const GroupOffsets& offsets, const GroupedGemmCall& call, int64_t g) {
  const auto row = offsets.begin(g), k = call.x.sizes()[1], n = call.out.sizes()[1];
  const auto x = rows_from(call.x, row);
  const StridedMatrix a{x.data, offsets.rows(g), k, x.ld, 1};
  const StridedMatrix b{call.w.data(g), k, n, call.transposed ? 1 : n, call.transposed ? k : 1};
  alignas(64) float scratch[kMaxSmallElems];
  group_loops(tier).gemm(x.dtype, a, b, scratch,
                         {rows_from(call.out, row), rows_of(call.bias, g), rows_from(call.scales, row)});
}

/// dW (+)= dYᵀ X for a small group.
void small_group(Tier tier, const GroupOffsets& offsets, const GroupedWgradCall& call, int64_t g) {
  const auto row = offsets.begin(g), rows = offsets.rows(g);
  const auto dy = rows_from(call.dy, row), x = rows_from(call.x, row);
  const StridedMatrix a{dy.data, call.out.rows(), rows, 1, dy.ld}, b{x.data, rows, call.out.columns(), x.ld, 1};
  alignas(64) float scratch[kMaxSmallElems];
  group_loops(tier).gemm(x.dtype, a, b, scratch, {rows_of(call.out, g), {}, {}, call.accumulate});
}

}  // namespace

void vector_grouped_gemm(Tier tier, const GroupOffsets& offsets, const GroupedGemmCall& call) {
  const auto k = call.x.sizes()[1], n = call.out.sizes()[1];
  for_each_group(
      offsets.groups(), offsets.total_rows() * n * k, [&](int64_t g) { return gemm_is_small(offsets.rows(g), n, k); },
      [&](int64_t g) { small_group(tier, offsets, call, g); }, [&](int64_t g) { split_gemm(offsets, call, g); });
}

void vector_grouped_wgrad(Tier tier, const GroupOffsets& offsets, const GroupedWgradCall& call) {
  const auto n = call.out.rows(), k = call.out.columns();
  for_each_group(
      offsets.groups(), offsets.total_rows() * n * k,
      [&](int64_t g) { return offsets.rows(g) > 0 && gemm_is_small(n, k, offsets.rows(g)); },
      [&](int64_t g) { small_group(tier, offsets, call, g); }, [&](int64_t g) { split_wgrad(offsets, call, g); });
}

void vector_grouped_bias_grad(Tier tier, const GroupOffsets& offsets, const GroupedBiasGradCall& call) {
  const auto columns = call.dy.sizes()[1];
  const auto group = [&](int64_t g) {
    const auto row = offsets.begin(g);
    return GroupRows{offsets.rows(g), columns, rows_from(call.dy, row), rows_of(call.bias, g),
                     rows_from(call.scales, row)};
  };
  constexpr int64_t kColumnsPerTask = 64;
  const auto parts = (columns + kColumnsPerTask - 1) / kColumnsPerTask;
  if (call.db.defined())
    parallel_rows(parts, (offsets.total_rows() + offsets.groups()) * kColumnsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t g = 0; g < offsets.groups(); ++g)
        group_loops(tier).sum_rows(group(g), rows_from(call.db, g), begin * kColumnsPerTask,
                                   std::min(columns, end * kColumnsPerTask));
    });
  if (call.ds.defined())
    parallel_rows(offsets.total_rows(), columns, [&](int64_t begin, int64_t end) {
      for (int64_t g = 0; g < offsets.groups(); ++g) {
        const auto first = std::max(begin, offsets.begin(g)), last = std::min(end, offsets.end(g));
        float* ds = call.ds.mutable_data_ptr<float>() + offsets.begin(g);
        if (first < last) group_loops(tier).dot_bias(group(g), ds, first - offsets.begin(g), last - offsets.begin(g));
      }
    });
}

}  // namespace weft::kernels
