#include "weft/ops/dot_product_attention.h"

#include <ATen/ops/empty.h>

#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {

DotProductAttention::DotProductAttention(Options options)
    : options_(std::move(options)),
      heads_(make_heads("DotProductAttention", options_.num_attention_heads, options_.num_gqa_groups,
                        options_.kv_channels)) {
  check_attention("DotProductAttention", attention_options());
}

kernels::Attention DotProductAttention::problem(const at::Tensor& cu_seqlens, const at::Tensor& seed) const {
  auto a = make_attention(heads_, attention_options());
  a.dropout = seed.defined() ? options_.attention_dropout : 0;
  a.seed = seed;
  a.cu_seqlens_q = a.cu_seqlens_kv = cu_seqlens;
  return a;
}

kernels::TierChoice DotProductAttention::kernel(const TierQuery& q) const {
  auto attention = problem({}, {});
  if (q.training) attention.dropout = options_.attention_dropout;
  return kernels::choose_attention_tier(attention, q.device, q.dtype, /*equal_lengths=*/true);
}

void DotProductAttention::check(const Spec& x, c10::ArrayRef<Spec> extra) const {
  const auto width = (heads_.heads + 2 * heads_.groups) * heads_.head_dim;
  TORCH_CHECK_VALUE(!x.sizes.empty() && same_size(x.sizes.back(), width), "input has shape ", x.sizes,
                    ", expected last dimension ", width,
                    " = (num_attention_heads + 2·num_gqa_groups)·kv_channels, with num_attention_heads ", heads_.heads,
                    ", num_gqa_groups ", heads_.groups, " and kv_channels ", heads_.head_dim, ".");
  if (packed()) check_cu_seqlens(extra[0]);
}

Inferred DotProductAttention::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra,
                                    c10::ArrayRef<Spec>) const {
  check(x, extra);
  const auto dtype = plan.dtype(x.dtype);
  Inferred out{.y = x.with_last(heads_.heads * heads_.head_dim).as(dtype)};
  out.saved.resize(5);
  if (!plan.needs_input_grad) return out;
  const SequenceDims dims(options_.qkv_format, x.sizes);
  out.saved[kInput] = saved_input(x, dtype);
  out.saved[kOutput] = out.y;
  out.saved[kLogsumexp] = logsumexp_spec(dims, heads_, dtype);
  if (packed()) out.saved[kOffsets] = extra[0];
  if (drops(plan)) out.saved[kSeed] = Spec{{}, at::kLong};
  return out;
}

Flops DotProductAttention::flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>) const {
  const SequenceDims dims(options_.qkv_format, x.sizes);
  return attention_flops(heads_, dims, dims.length, plan.needs_grad);
}

kernels::Qkv DotProductAttention::qkv_views(const at::Tensor& x) const {
  const auto [heads, groups, d] = heads_;
  const auto rows = batch_first(x, options_.qkv_format);
  if (options_.qkv_layout == QkvLayout::concatenated) {
    const auto part = [&](int64_t first, int64_t count) { return rows.narrow(2, first * d, count * d); };
    return {part(0, heads).unflatten(2, {groups, heads / groups, d}), part(heads, groups).unflatten(2, {groups, d}),
            part(heads + groups, groups).unflatten(2, {groups, d})};
  }
  const auto per_group = heads / groups;
  const auto grouped = rows.unflatten(2, {groups, per_group + 2, d});
  return {grouped.narrow(3, 0, per_group), grouped.select(3, per_group), grouped.select(3, per_group + 1)};
}

at::Tensor DotProductAttention::head_views(const at::Tensor& y) const {
  const auto [heads, groups, d] = heads_;
  return batch_first(y, options_.qkv_format).unflatten(2, {groups, heads / groups, d});
}

at::Tensor DotProductAttention::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  std::vector<Spec> specs;
  if (packed()) specs.push_back(Spec::of(ctx.extra_input(0)));
  check(Spec::of(x), specs);
  auto input = as_dtype(x, ctx.dtype(x.scalar_type()));
  const auto offsets = packed() ? ctx.extra_input(0) : at::Tensor();
  const auto seed = drops(ctx.plan()) ? draw_seed(input) : at::Tensor();
  auto sizes = x.sizes().vec();
  sizes.back() = heads_.heads * heads_.head_dim;
  auto y = at::empty(sizes, input.options());
  auto logsumexp = kernels::attention_forward(problem(offsets, seed), qkv_views(input), head_views(y));
  if (!ctx.needs_input_grad()) return y;
  ctx.save(kInput, std::move(input));
  ctx.save(kOutput, y);
  ctx.save(kLogsumexp, std::move(logsumexp));
  if (packed()) ctx.save(kOffsets, offsets);
  if (seed.defined()) ctx.save(kSeed, seed);
  return y;
}

at::Tensor DotProductAttention::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (!ctx.needs_input_grad()) return {};
  const auto& x = ctx.saved(kInput);
  auto dx = at::empty(x.sizes(), x.options());
  kernels::attention_backward(problem(ctx.saved(kOffsets), ctx.saved(kSeed)), qkv_views(x),
                              head_views(ctx.saved(kOutput)), ctx.saved(kLogsumexp), head_views(dy), qkv_views(dx));
  return dx;
}

static const Register<DotProductAttention> dot_product_attention{
    "DotProductAttention",
    {.summary = "Applies softmax attention to packed queries, keys and values: y = softmax(scale·q kᵀ + mask) v.",
     .details = "Each query head uses the key and value head of its group. Computed in float32 (float64 for float64). "
                "Dropout draws one seed from torch's generator in each call. With the format \"thd\" the extra input "
                "cu_seqlens (int32 or int64) holds the row at which each sequence starts, and the number of rows.",
     .shape = "Input: ``(s, *, w)`` with ``sbhd``, ``(*, s, w)`` with ``bshd``, ``(t, w)`` with ``thd``; ``w = "
              "(num_attention_heads + 2 * num_gqa_groups) * kv_channels``.\nExtra input with ``thd``: cu_seqlens "
              "``(sequences + 1)``.\nOutput: the input's shape with last dimension ``num_attention_heads * "
              "kv_channels``.",
     .example_inputs = "torch.randn(5, 3, 12)",
     .example_shape = "[5, 3, 4]"},
    {.num_attention_heads = 2, .kv_channels = 2, .num_gqa_groups = 1, .window_size = std::vector<int64_t>{1, -1}}};

}  // namespace weft::ops
