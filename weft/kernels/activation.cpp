#include "weft/kernels/activation.h"

#include <ATen/ops/zeros.h>

#include <numeric>
#include <vector>

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/launch.h"
#include "weft/kernels/operand.h"
#include "weft/kernels/precision.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

using Loop = void (*)(const ActCall& call, int64_t begin, int64_t end);

/// Fresh memory for act(x).
at::Tensor output(const Act& act, const at::Tensor& x) {
  if (!act.gated()) return fresh(x.sizes(), x.scalar_type());
  c10::SmallVector<int64_t, 5> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() /= 2;
  return fresh(sizes, x.scalar_type());
}

/// One call of a loop, and memory that it can read.
struct Problem {
  at::Tensor x, dy;     // contiguous
  int64_t rows, width;  // width: values in a row of x
  ActCall call;

  Problem(const Act& act, const at::Tensor& input) : x(contiguous(input)) {
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
    dy = contiguous(grad);
    call.dy_dtype = dy.scalar_type();
    call.dy = dy.const_data_ptr();
  }
  void run(Loop loop) const {
    if (!call.act.gated() && !call.scales && !call.ds) return run_flat(loop);
    in_rows(rows, width, [&](int64_t begin, int64_t end) { loop(call, begin, end); });
  }
  /// dx and its column sums, `together` rows as one long row, as far as they go; returns how many rows that were.
  int64_t sum_backward(Tier tier, int64_t together, float* sums) const {
    const auto length = together * width;
    ActCall longer = call;
    longer.columns = length;
    std::vector<float> all(static_cast<size_t>(length));
    sum_in_rows(rows / together, length, all.data(), [&](int64_t begin, int64_t end, float* partial) {
      ActCall part = longer;
      part.sums = partial;
      act_loops(tier).backward(part, begin, end);
    });
    for (const float* row = all.data(); row < all.data() + length; row += width)
      for (int64_t i = 0; i < width; ++i) sums[i] += row[i];
    return rows / together * together;
  }
  /// With nothing per row, all values are one row.
  void run_flat(Loop loop) const {
    in_rows(x.numel(), 1, [&](int64_t begin, int64_t end) {
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

/// How many short rows make one of whole vectors: each alone would leave many lanes of its last vector empty.
int64_t whole_vectors(const Act& act, int64_t width) {
  constexpr int64_t kLanes = 16, kShort = 128;
  return act.gated() || width >= kShort || width == 0 ? 1 : kLanes / std::gcd(kLanes, width);
}

/// The scales as float32 values one after the other.
at::Tensor plain_scales(const at::Tensor& scales) { return contiguous(as_dtype(scales, at::kFloat)); }

}  // namespace

at::Tensor activation_forward(const Act& act, const at::Tensor& x) {
  const auto tier = vector_tier(x);
  if (tier == Tier::ref) return ref::activation_forward(act, x);
  Problem problem(act, x);
  auto y = output(act, x);
  problem.call.out = y.mutable_data_ptr();
  problem.run(act_loops(tier).forward);
  return y;
}

at::Tensor activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x) {
  const auto tier = vector_tier(x, dy);
  if (tier == Tier::ref) return ref::activation_backward(act, dy, x);
  Problem problem(act, x);
  problem.set_dy(dy);
  auto dx = fresh(x.sizes(), x.scalar_type());
  problem.call.out = dx.mutable_data_ptr();
  problem.run(act_loops(tier).backward);
  return dx;
}

ActivationSums activation_backward_sums(const Act& act, const at::Tensor& dy, const at::Tensor& x) {
  const auto tier = vector_tier(x, dy);
  if (tier == Tier::ref) return ref::activation_backward_sums(act, dy, x);
  Problem problem(act, x);
  problem.set_dy(dy);
  ActivationSums out{fresh(x.sizes(), x.scalar_type()), fresh_zeros(problem.width)};
  problem.call.out = out.dx.mutable_data_ptr();
  auto* sums = out.sums.mutable_data_ptr<float>();
  const auto rows_together = whole_vectors(act, problem.width);
  const auto taken = rows_together > 1 ? problem.sum_backward(tier, rows_together, sums) : 0;
  sum_in_rows(problem.rows - taken, problem.width, sums, [&](int64_t begin, int64_t end, float* partial) {
    ActCall part = problem.call;
    part.sums = partial;
    act_loops(tier).backward(part, taken + begin, taken + end);
  });
  return out;
}

/// The tier for scaled activations.
static Tier scaled_tier(const at::Tensor& scales, const at::Tensor& x, const at::Tensor& dy = {}) {
  return scales.is_cpu() && is_bare(scales) ? vector_tier(x, dy) : Tier::ref;
}

at::Tensor scaled_activation_forward(const Act& act, const at::Tensor& x, const at::Tensor& scales) {
  const auto tier = scaled_tier(scales, x);
  if (tier == Tier::ref) return launch_aten([=] { return ref::scaled_activation_forward(act, x, scales); });
  auto y = output(act, x);
  launch([=] {
    Problem problem(act, x);
    const auto s = plain_scales(scales);
    problem.call.scales = s.const_data_ptr<float>();
    problem.call.out = y.mutable_data_ptr();
    problem.run(act_loops(tier).forward);
  });
  return y;
}

std::pair<at::Tensor, at::Tensor> scaled_activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x,
                                                             const at::Tensor& scales, bool dx_wanted, bool ds_wanted) {
  if (!dx_wanted && !ds_wanted) return {};
  const auto tier = scaled_tier(scales, x, dy);
  if (tier == Tier::ref) {
    const auto both = [=](bool dx, bool ds) { return ref::scaled_activation_backward(act, dy, x, scales, dx, ds); };
    if (!launch_watcher()) return both(dx_wanted, ds_wanted);
    return {launch_aten([=] { return both(dx_wanted, false).first; }),
            launch_aten([=] { return both(false, ds_wanted).second; })};
  }
  at::Tensor dx, ds;
  if (dx_wanted) dx = fresh(x.sizes(), x.scalar_type());
  if (ds_wanted) ds = fresh(scales.sizes(), scales.scalar_type());
  launch([=] {
    Problem problem(act, x);
    problem.set_dy(dy);
    const auto s = plain_scales(scales);
    problem.call.scales = s.const_data_ptr<float>();
    if (dx.defined()) problem.call.out = dx.mutable_data_ptr();
    at::Tensor sums;  // where rows of no values leave 0
    if (ds.defined()) {
      const bool direct = ds.scalar_type() == at::kFloat && problem.rows > 0;
      sums = direct ? ds : at::zeros(ds.sizes(), at::kFloat);
      problem.call.ds = sums.mutable_data_ptr<float>();
    }
    problem.run(act_loops(tier).backward);
    if (ds.defined() && !sums.is_same(ds)) ds.copy_(sums);
  });
  return {dx, ds};
}

}  // namespace weft::kernels
