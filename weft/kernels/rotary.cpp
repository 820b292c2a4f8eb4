#include "weft/kernels/rotary.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>

#include <numeric>

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/opmath.h"
#include "weft/kernels/sequence_offsets.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {

RotaryTables rotary_tables(int64_t positions, const RotaryHeads& heads, double base, const at::Tensor& like) {
  const auto options = like.options().dtype(at::kDouble);
  const auto exponents = at::arange(heads.pairs(), options).mul_(-2.0 / static_cast<double>(heads.rotary_dim));
  const auto angles = at::outer(at::arange(positions, options), at::pow(base, exponents));
  const auto dtype = at::toOpMathType(like.scalar_type());
  return {as_dtype(angles.cos(), dtype), as_dtype(angles.sin(), dtype)};
}

at::Tensor packed_positions(const at::Tensor& cu_seqlens, int64_t rows, int64_t positions) {
  const auto options = cu_seqlens.options().dtype(at::kLong);
  if (cu_seqlens.is_meta()) return at::empty({rows}, options);
  const SequenceOffsets offsets(cu_seqlens, rows);
  TORCH_CHECK_VALUE(offsets.longest() <= positions, "cu_seqlens has a sequence of ", offsets.longest(),
                    " rows, cos and sin have ", positions, "; expected at least as many as the longest sequence has.");
  auto result = at::empty({rows}, options.device(at::kCPU));
  auto* values = result.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < offsets.sequences(); ++i) std::iota(values + offsets.begin(i), values + offsets.end(i), 0);
  return result.to(options.device());
}

at::Tensor rotary(const at::Tensor& x, const RotaryTables& tables, const RotaryHeads& heads,
                  RotaryDirection direction) {
  const auto is_float = [](const at::Tensor& t) { return t.scalar_type() == at::kFloat; };
  const bool float_tables = is_float(tables.cos) && is_float(tables.sin);
  const auto tier = float_tables ? vector_tier(x, tables.cos, tables.sin) : Tier::ref;
  if (tier == Tier::ref) return ref::rotary(x, tables, heads, direction);
  const auto dense = contiguous(x, x.numel(), "the input"), cos = contiguous(tables.cos), sin = contiguous(tables.sin);
  auto y = new_empty(x, x.sizes(), x.scalar_type());
  const RotaryCall call{.heads = heads,
                        .positions = x.size(1),
                        .rows_per_position = x.size(2),
                        .dtype = x.scalar_type(),
                        .x = dense.const_data_ptr(),
                        .out = y.mutable_data_ptr(),
                        .cos = cos.const_data_ptr<float>(),
                        .sin = sin.const_data_ptr<float>(),
                        .sign = direction == RotaryDirection::forward ? 1.F : -1.F};
  parallel_rows(x.size(0) * x.size(1) * x.size(2), heads.width(),
                [&](int64_t begin, int64_t end) { rotary_loop(tier)(call, begin, end); });
  return y;
}

RotaryTables rotary_table_gradients(const at::Tensor& dy, const at::Tensor& x, const RotaryHeads& heads) {
  return ref::rotary_table_gradients(dy, x, heads);
}

}  // namespace weft::kernels
