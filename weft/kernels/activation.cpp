#include "weft/kernels/activation.h"

#include <ATen/ops/zeros.h>

#include <numeric>
#include <vector>

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/launch.h"
#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

using Loop = void (*)(const ActCall& call, int64_t begin, int64_t end);

/// An uninitialized tensor with the shape of act(x).
at::Tensor output(const Act& act, const at::Tensor& x) {
  if (!act.gated()) return new_empty(x, x.sizes(), x.scalar_type());
  c10::SmallVector<int64_t, 5> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() /= 2;
  return new_empty(x, sizes, x.scalar_type());
}

/// The arguments of a loop, with contiguous inputs.
struct PreparedActivation {
  at::Tensor x, dy;     // contiguous
  int64_t rows, width;  // width: elements in a row of x
  ActCall call;

  PreparedActivation(const Act& act, const at::Tensor& input) : x(contiguous(input, input.numel(), "the input")) {
    width = x.dim() == 0 ? 1 : x.sizes().back();
    rows = width == 0 ? 0 : x.numel() / width;
    const auto columns = act.gated() ? width / 2 : width;
    call.act = act;
    call.blocks = act.gated() && act.interleave > 0 ? columns / act.interleave : 1;
    call.columns = call.blocks == 0 ? 0 : columns / call.blocks;
    call.dtype = x.scalar_type();
    call.x = x.const_data_ptr();
  }
  void set_dy(const at::Tensor& grad) {
    dy = contiguous(grad, call.act.gated() ? x.numel() / 2 : x.numel(), "the gradient");
    call.dy_dtype = dy.scalar_type();
    call.dy = dy.const_data_ptr();
  }
  void run(Loop loop) const {
    if (!call.act.gated() && !call.scales && !call.ds) return run_flat(loop);
    parallel_rows(rows, width, [&](int64_t begin, int64_t end) { loop(call, begin, end); });
  }
  /// Computes dx and adds its column sums to `sums`, taking `group_rows` rows as one long row. Skips the remainder and
  /// returns the number of rows processed.
  int64_t sum_backward(Tier tier, int64_t group_rows, float* sums) const {
    const auto length = group_rows * width;
    ActCall longer = call;
    longer.columns = length;
    std::vector<float> all(static_cast<size_t>(length));
    parallel_reduce_rows(rows / group_rows, length, all.data(), [&](int64_t begin, int64_t end, float* partial) {
      ActCall part = longer;
      part.column_sums = partial;
      act_loops(tier).backward(part, begin, end);
    });
    for (const float* row = all.data(); row < all.data() + length; row += width)
      for (int64_t i = 0; i < width; ++i) sums[i] += row[i];
    return rows / group_rows * group_rows;
  }
  /// Without per-row arguments, x is one row.
  void run_flat(Loop loop) const {
    parallel_rows(x.numel(), 1, [&](int64_t begin, int64_t end) {
      const auto size = static_cast<int64_t>(c10::elementSize(call.dtype));
      ActCall part = call;
      part.columns = end - begin;
      part.x = static_cast<const char*>(call.x) + begin * size;
      part.out = static_cast<char*>(call.out) + begin * size;
      if (call.dy) part.dy = static_cast<const char*>(call.dy) + begin * dy.element_size();
      loop(part, 0, 1);
    });
  }
};

/// How many short rows to join into one row of full vectors; a single short row would leave lanes of its vectors idle.
int64_t rows_to_fill_vectors(const Act& act, int64_t width) {
  constexpr int64_t kLanes = 16, kShortRow = 128;
  return act.gated() || width >= kShortRow || width == 0 ? 1 : kLanes / std::gcd(kLanes, width);
}

/// The scales of `rows` rows as contiguous float32.
at::Tensor plain_scales(const at::Tensor& scales, int64_t rows) {
  check_elements(scales, rows, "the tensor of scales");
  return contiguous(as_dtype(scales, at::kFloat));
}

}  // namespace

at::Tensor activation_forward(const Act& act, const at::Tensor& x) {
  const auto tier = vector_tier(x);
  if (tier == Tier::ref) return ref::activation_forward(act, x);
  PreparedActivation prepared(act, x);
  auto y = output(act, x);
  prepared.call.out = y.mutable_data_ptr();
  prepared.run(act_loops(tier).forward);
  return y;
}

at::Tensor activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x) {
  const auto tier = vector_tier(x, dy);
  if (tier == Tier::ref) return ref::activation_backward(act, dy, x);
  PreparedActivation prepared(act, x);
  prepared.set_dy(dy);
  auto dx = new_empty(x, x.sizes(), x.scalar_type());
  prepared.call.out = dx.mutable_data_ptr();
  prepared.run(act_loops(tier).backward);
  return dx;
}

ActivationColumnSums activation_backward_column_sums(const Act& act, const at::Tensor& dy, const at::Tensor& x) {
  const auto tier = vector_tier(x, dy);
  if (tier == Tier::ref) return ref::activation_backward_column_sums(act, dy, x);
  PreparedActivation prepared(act, x);
  prepared.set_dy(dy);
  ActivationColumnSums out{new_empty(x, x.sizes(), x.scalar_type()), new_zeros_f32(x, prepared.width)};
  prepared.call.out = out.dx.mutable_data_ptr();
  auto* sums = out.column_sums.mutable_data_ptr<float>();
  const auto group_rows = rows_to_fill_vectors(act, prepared.width);
  const auto taken = group_rows > 1 ? prepared.sum_backward(tier, group_rows, sums) : 0;
  parallel_reduce_rows(prepared.rows - taken, prepared.width, sums, [&](int64_t begin, int64_t end, float* partial) {
    ActCall part = prepared.call;
    part.column_sums = partial;
    act_loops(tier).backward(part, taken + begin, taken + end);
  });
  return out;
}

/// The tier for scaled activations.
static Tier scaled_tier(const at::Tensor& scales, const at::Tensor& x, const at::Tensor& dy = {}) {
  return in_host_memory(scales.device()) && is_plain_strided(scales) ? vector_tier(x, dy) : Tier::ref;
}

at::Tensor scaled_activation_forward(const Act& act, const at::Tensor& x, const at::Tensor& scales) {
  const auto tier = scaled_tier(scales, x);
  if (tier == Tier::ref) return launch_aten([=] { return ref::scaled_activation_forward(act, x, scales); });
  auto y = output(act, x);
  launch([=] {
    PreparedActivation prepared(act, x);
    const auto s = plain_scales(scales, prepared.width == 0 ? scales.numel() : prepared.rows);
    prepared.call.scales = s.const_data_ptr<float>();
    prepared.call.out = y.mutable_data_ptr();
    prepared.run(act_loops(tier).forward);
  });
  return y;
}

std::pair<at::Tensor, at::Tensor> scaled_activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x,
                                                             const at::Tensor& scales, bool needs_dx, bool needs_ds) {
  if (!needs_dx && !needs_ds) return {};
  const auto tier = scaled_tier(scales, x, dy);
  if (tier == Tier::ref) {
    const auto both = [=](bool dx, bool ds) { return ref::scaled_activation_backward(act, dy, x, scales, dx, ds); };
    if (!launch_hook()) return both(needs_dx, needs_ds);
    return {launch_aten([=] { return both(needs_dx, false).first; }),
            launch_aten([=] { return both(false, needs_ds).second; })};
  }
  at::Tensor dx, ds;
  if (needs_dx) dx = new_empty(x, x.sizes(), x.scalar_type());
  if (needs_ds) ds = new_empty(x, scales.sizes(), scales.scalar_type());
  launch([=] {
    PreparedActivation prepared(act, x);
    prepared.set_dy(dy);
    const auto s = plain_scales(scales, prepared.width == 0 ? scales.numel() : prepared.rows);
    prepared.call.scales = s.const_data_ptr<float>();
    if (dx.defined()) prepared.call.out = dx.mutable_data_ptr();
    at::Tensor sums;  // starts at 0 if x has empty rows, for which the loop writes nothing
    if (ds.defined()) {
      const bool direct = ds.scalar_type() == at::kFloat && prepared.rows > 0;
      sums = direct ? ds : at::zeros(ds.sizes(), at::kFloat);
      prepared.call.ds = sums.mutable_data_ptr<float>();
    }
    prepared.run(act_loops(tier).backward);
    if (ds.defined() && !sums.is_same(ds)) ds.copy_(sums);
  });
  return {dx, ds};
}

}  // namespace weft::kernels
