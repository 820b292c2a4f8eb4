#include "weft/ops/rotary_embedding.h"

#include <ATen/ops/zeros.h>

#include <cmath>

#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {
namespace {

kernels::RotaryHeads rotary_heads(const RotaryEmbedding::Options& o) {
  const auto [heads, groups, head_dim] =
      make_heads("RotaryEmbedding", o.num_attention_heads, o.num_gqa_groups, o.kv_channels);
  const auto rotary_dim = o.rotary_dim.value_or(head_dim);
  TORCH_CHECK_VALUE(rotary_dim >= 2 && rotary_dim <= head_dim && rotary_dim % 2 == 0, "RotaryEmbedding: rotary_dim is ",
                    rotary_dim, ", expected an even number from 2 to kv_channels, ", head_dim, ".");
  TORCH_CHECK_VALUE(!o.rotary_base || (*o.rotary_base > 0 && std::isfinite(*o.rotary_base)),
                    "RotaryEmbedding: rotary_base is ", o.rotary_base.value_or(0),
                    ", expected a positive number or None.");
  const auto arranged = [&](int64_t blocks, int64_t rotated, int64_t kept) {
    return kernels::RotaryHeads{head_dim, rotary_dim, blocks, rotated, kept, o.interleaved};
  };
  if (!o.qkv_layout) return arranged(1, heads, 0);
  if (*o.qkv_layout == QkvLayout::concatenated) return arranged(1, heads + groups, groups);
  return arranged(groups, heads / groups + 1, 1);
}

}  // namespace

RotaryEmbedding::RotaryEmbedding(Options options) : options_(options), heads_(rotary_heads(options)) {}

void RotaryEmbedding::check(const Spec& x, c10::ArrayRef<Spec> extra) const {
  const auto groups = options_.num_gqa_groups.value_or(options_.num_attention_heads);
  TORCH_CHECK_VALUE(!x.sizes.empty() && same_size(x.sizes.back(), heads_.width()), "input has shape ", x.sizes,
                    ", expected last dimension ", heads_.width(), " = ",
                    options_.qkv_layout ? "(num_attention_heads + 2·num_gqa_groups)" : "num_attention_heads",
                    "·kv_channels, with num_attention_heads ", options_.num_attention_heads,
                    options_.qkv_layout ? c10::str(", num_gqa_groups ", groups) : std::string(), " and kv_channels ",
                    heads_.head_dim,
                    options_.qkv_layout ? "." : "; set qkv_layout for packed queries, keys and values.");
  if (packed()) check_cu_seqlens(extra[offsets_index()]);
  if (!takes_tables()) return;
  const auto length = SequenceDims(options_.qkv_format, x.sizes).length;
  for (int i = 0; i < 2; ++i) {
    const auto& table = extra[i].sizes;
    const bool fits = table.size() == 2 && same_size(table[1], heads_.pairs()) && (packed() || table[0] >= length);
    TORCH_CHECK_VALUE(fits, i == 0 ? "cos" : "sin", " has shape ", table, ", expected [",
                      packed() ? "positions of the longest sequence or more" : c10::str(length, " or more"), ", ",
                      heads_.pairs(), "], with one row for each position and one column for each rotated pair.");
  }
}

Inferred RotaryEmbedding::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra,
                                c10::ArrayRef<Spec>) const {
  check(x, extra);
  Inferred out{.y = x};
  out.saved.resize(4);
  if (!plan.needs_grad) return out;
  if (takes_tables()) out.saved[kCos] = extra[0], out.saved[kSin] = extra[1];
  if (packed()) out.saved[kOffsets] = extra[offsets_index()];
  if (needs_table_grads(plan)) out.saved[kInput] = saved_input(x, x.dtype);
  return out;
}

at::Tensor RotaryEmbedding::rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                                   const at::Tensor& cu_seqlens, kernels::RotaryDirection direction) const {
  const auto sizes = SequenceDims(options_.qkv_format, x.sym_sizes()).sizes(heads_.width());
  const auto length = sizes[1];
  const auto dtype = at::toOpMathType(x.scalar_type());
  auto tables = takes_tables() ? kernels::RotaryTables{as_dtype(cos, dtype), as_dtype(sin, dtype)}
                               : kernels::rotary_tables(length, heads_, *options_.rotary_base, x);
  if (packed()) {
    const auto positions = kernels::packed_positions(cu_seqlens, length, tables.cos.size(0));
    tables = {tables.cos.index_select(0, positions), tables.sin.index_select(0, positions)};
  }
  return kernels::rotary(x.reshape(sizes), tables, heads_, direction).view(x.sizes());
}

at::Tensor RotaryEmbedding::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  std::vector<Spec> specs;
  for (int i = 0; i < extra_inputs(); ++i) specs.push_back(Spec::of(ctx.extra_input(i)));
  check(Spec::of(x), specs);
  const auto cos = takes_tables() ? ctx.extra_input(0) : at::Tensor(),
             sin = takes_tables() ? ctx.extra_input(1) : at::Tensor(),
             offsets = packed() ? ctx.extra_input(offsets_index()) : at::Tensor();
  auto y = rotate(x, cos, sin, offsets, kernels::RotaryDirection::forward);
  if (!ctx.needs_grad()) return y;
  if (takes_tables()) ctx.save(kCos, cos), ctx.save(kSin, sin);
  if (packed()) ctx.save(kOffsets, offsets);
  if (needs_table_grads(ctx.plan())) ctx.save(kInput, x);
  return y;
}

at::Tensor RotaryEmbedding::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (needs_table_grads(ctx.plan())) differentiate_tables(ctx, dy);
  if (!ctx.needs_input_grad()) return {};
  return rotate(dy, ctx.saved(kCos), ctx.saved(kSin), ctx.saved(kOffsets), kernels::RotaryDirection::inverse);
}

void RotaryEmbedding::differentiate_tables(OpContext& ctx, const at::Tensor& dy) const {
  const auto sizes = SequenceDims(options_.qkv_format, dy.sym_sizes()).sizes(heads_.width());
  const auto grads = kernels::rotary_table_gradients(dy.reshape(sizes), ctx.saved(kInput).reshape(sizes), heads_);
  const auto set = [&](int i, const at::Tensor& table, const at::Tensor& rows) {
    if (!ctx.needs_extra_grad(i)) return;
    auto grad = at::zeros(table.sizes(), rows.options());
    if (packed())
      grad.index_add_(0, kernels::packed_positions(ctx.saved(kOffsets), sizes[1], table.size(0)), rows);
    else
      grad.narrow(0, 0, sizes[1]).copy_(rows);
    ctx.set_extra_input_grad(i, as_dtype(grad, table.scalar_type()));
  };
  set(0, ctx.saved(kCos), grads.cos);
  set(1, ctx.saved(kSin), grads.sin);
}

static const Register<RotaryEmbedding> rotary_embedding{
    "RotaryEmbedding",
    {.summary = "Rotates query and key heads by their position: y = (a·cos φ - b·sin φ, b·cos φ + a·sin φ).",
     .details = "(a, b) is pair i of the rotated channels, φ = position·rotary_base^(-2i/rotary_dim). Positions count "
                "from 0 in each sequence. Value heads and channels from rotary_dim on are copied. Computed in float32 "
                "(float64 for float64); autocast does not change the dtype of the output. The extra inputs are cos φ "
                "and sin φ with rotary_base=None, then cu_seqlens (int32 or int64) with the format \"thd\": the row "
                "at which each sequence starts, and the number of rows.",
     .shape = "Input: ``(s, *, w)`` with ``sbhd``, ``(*, s, w)`` with ``bshd``, ``(t, w)`` with ``thd``; ``w = "
              "(num_attention_heads + 2 * num_gqa_groups) * kv_channels``, or ``num_attention_heads * kv_channels`` "
              "with ``qkv_layout=None``.\nExtra inputs: cos and sin ``(s or more, rotary_dim / 2)``; cu_seqlens "
              "``(sequences + 1)``.\nOutput: same as the input.",
     .example_inputs = "torch.randn(5, 3, 12)",
     .example_shape = "[5, 3, 12]"},
    {.num_attention_heads = 2,
     .kv_channels = 2,
     .num_gqa_groups = 1,
     .qkv_layout = QkvLayout::group_interleaved,
     .qkv_format = QkvFormat::sbhd}};

}  // namespace weft::ops
