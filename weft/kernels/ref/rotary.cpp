#include "weft/kernels/rotary.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/mul.h>

#include <utility>

#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::ref {
namespace {

/// Views of both values of each pair, [outer, T, inner, blocks, rotated, pairs]. `t` is [outer, T, inner, width] and
/// contiguous.
std::pair<at::Tensor, at::Tensor> pairs_of(const at::Tensor& t, const RotaryHeads& h) {
  const auto values = t.view({t.size(0), t.size(1), t.size(2), h.blocks, h.rotated + h.kept, h.head_dim})
                          .narrow(-2, 0, h.rotated)
                          .narrow(-1, 0, h.rotary_dim);
  if (h.interleaved) return {values.slice(-1, 0, h.rotary_dim, 2), values.slice(-1, 1, h.rotary_dim, 2)};
  return {values.narrow(-1, 0, h.pairs()), values.narrow(-1, h.pairs(), h.pairs())};
}

/// The first `positions` rows of a table, to be broadcast to the pairs.
at::Tensor table_rows(const at::Tensor& table, int64_t positions) {
  return table.narrow(0, 0, positions).unsqueeze(1).unsqueeze(1).unsqueeze(1);
}

}  // namespace

at::Tensor rotary(const at::Tensor& x, const RotaryTables& tables, const RotaryHeads& heads,
                  RotaryDirection direction) {
  auto y = at::clone(x, at::MemoryFormat::Contiguous);
  const auto [a_in, b_in] = pairs_of(x.contiguous(), heads);
  const auto [a_out, b_out] = pairs_of(y, heads);
  const auto a = to_opmath(a_in), b = to_opmath(b_in);
  const auto cos = table_rows(tables.cos, x.size(1)), table = table_rows(tables.sin, x.size(1));
  const auto sin = direction == RotaryDirection::forward ? table : table.neg();
  a_out.copy_(at::mul(a, cos).sub_(at::mul(b, sin)));
  b_out.copy_(at::mul(b, cos).add_(at::mul(a, sin)));
  return y;
}

RotaryTables rotary_table_gradients(const at::Tensor& dy, const at::Tensor& x, const RotaryHeads& heads) {
  const auto [a_in, b_in] = pairs_of(x.contiguous(), heads);
  const auto [da_in, db_in] = pairs_of(dy.contiguous(), heads);
  const auto a = to_opmath(a_in), b = to_opmath(b_in), da = to_opmath(da_in), db = to_opmath(db_in);
  const auto sum = [](const at::Tensor& t) { return t.sum({0, 2, 3, 4}); };
  return {sum(at::mul(da, a).add_(at::mul(db, b))), sum(at::mul(db, a).sub_(at::mul(da, b)))};
}

}  // namespace weft::kernels::ref
