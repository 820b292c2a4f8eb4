#include "weft/ops/cross_dot_product_attention.h"

#include <ATen/ops/empty.h>

#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {

CrossDotProductAttention::CrossDotProductAttention(Options options)
    : options_(std::move(options)),
      heads_(make_heads("CrossDotProductAttention", options_.num_attention_heads, options_.num_gqa_groups,
                        options_.kv_channels)) {
  check_attention("CrossDotProductAttention", attention_options());
}

kernels::Attention CrossDotProductAttention::problem(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_kv,
                                                     const at::Tensor& seed) const {
  auto a = make_attention(heads_, attention_options());
  a.dropout = seed.defined() ? options_.attention_dropout : 0;
  a.seed = seed;
  a.cu_seqlens_q = cu_seqlens_q, a.cu_seqlens_kv = cu_seqlens_kv;
  return a;
}

/// For queries and keys of unequal lengths.
kernels::TierChoice CrossDotProductAttention::kernel(const TierQuery& q) const {
  auto attention = problem({}, {}, {});
  if (q.training) attention.dropout = options_.attention_dropout;
  return kernels::choose_attention_tier(attention, q.device, q.dtype, /*equal_lengths=*/false);
}

void CrossDotProductAttention::check(const Spec& x, c10::ArrayRef<Spec> extra) const {
  const auto [heads, groups, d] = heads_;
  const auto &k = extra[kKey], &v = extra[kValue];
  TORCH_CHECK_VALUE(!x.sizes.empty() && same_size(x.sizes.back(), heads * d), "input has shape ", x.sizes,
                    ", expected last dimension ", heads * d, " = num_attention_heads·kv_channels, with ",
                    "num_attention_heads ", heads, " and kv_channels ", d, ".");
  TORCH_CHECK_VALUE(!k.sizes.empty() && same_size(k.sizes.back(), groups * d), "key has shape ", k.sizes,
                    ", expected last dimension ", groups * d, " = num_gqa_groups·kv_channels, with ", "num_gqa_groups ",
                    groups, " and kv_channels ", d, ".");
  TORCH_CHECK_VALUE(same_sizes(v.sizes, k.sizes), "value has shape ", v.sizes, ", expected that of the key, ", k.sizes,
                    ".");
  if (packed()) {
    check_cu_seqlens(extra[kCuSeqlensQ], "cu_seqlens_q");
    check_cu_seqlens(extra[kCuSeqlensKv], "cu_seqlens_kv");
  }
  const SequenceDims queries(options_.qkv_format, x.sizes), keys(options_.qkv_format, k.sizes);
  const auto batch = queries.outer * queries.inner, other = keys.outer * keys.inner;
  TORCH_CHECK_VALUE(same_size(batch, other), "input has shape ", x.sizes, ", key and value have shape ", k.sizes,
                    "; expected ", batch, " sequences in all, got ", other, ".");
}

Inferred CrossDotProductAttention::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra,
                                         c10::ArrayRef<Spec>) const {
  check(x, extra);
  const auto dtype = plan.dtype(x.dtype);
  Inferred out{.y = x.as(dtype)};
  out.saved.resize(8);
  if (!plan.needs_grad) return out;
  out.saved[kSavedQuery] = saved_input(x, dtype);
  out.saved[kSavedKey] = extra[kKey].as(dtype), out.saved[kSavedValue] = extra[kValue].as(dtype);
  out.saved[kOutput] = out.y;
  out.saved[kLogsumexp] = logsumexp_spec(SequenceDims(options_.qkv_format, x.sizes), heads_, dtype);
  if (packed()) out.saved[kQueryOffsets] = extra[kCuSeqlensQ], out.saved[kKeyOffsets] = extra[kCuSeqlensKv];
  if (drops(plan)) out.saved[kSeed] = Spec{{}, at::kLong};
  return out;
}

Flops CrossDotProductAttention::flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra) const {
  const auto keys = SequenceDims(options_.qkv_format, extra[kKey].sizes).length;
  return attention_flops(heads_, SequenceDims(options_.qkv_format, x.sizes), keys, plan.needs_grad);
}

at::Tensor CrossDotProductAttention::query_views(const at::Tensor& q) const {
  const auto [heads, groups, d] = heads_;
  return batch_first(q, options_.qkv_format).unflatten(2, {groups, heads / groups, d});
}

kernels::Qkv CrossDotProductAttention::qkv_views(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  const auto head_views = [&](const at::Tensor& t) {
    return batch_first(t, options_.qkv_format).unflatten(2, {heads_.groups, heads_.head_dim});
  };
  return {query_views(q), head_views(k), head_views(v)};
}

at::Tensor CrossDotProductAttention::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  std::vector<Spec> specs;
  for (int i = 0; i < extra_inputs(); ++i) specs.push_back(Spec::of(ctx.extra_input(i)));
  check(Spec::of(x), specs);
  auto q = as_dtype(x, ctx.dtype(x.scalar_type()));
  auto k = as_dtype(ctx.extra_input(kKey), q.scalar_type()), v = as_dtype(ctx.extra_input(kValue), q.scalar_type());
  const auto offsets_q = packed() ? ctx.extra_input(kCuSeqlensQ) : at::Tensor(),
             offsets_kv = packed() ? ctx.extra_input(kCuSeqlensKv) : at::Tensor();
  const auto seed = drops(ctx.plan()) ? draw_seed(q) : at::Tensor();
  auto y = at::empty(x.sizes(), q.options());
  auto logsumexp = kernels::attention_forward(problem(offsets_q, offsets_kv, seed), qkv_views(q, k, v), query_views(y));
  if (!ctx.needs_grad()) return y;
  ctx.save(kSavedQuery, std::move(q));
  ctx.save(kSavedKey, std::move(k));
  ctx.save(kSavedValue, std::move(v));
  ctx.save(kOutput, y);
  ctx.save(kLogsumexp, std::move(logsumexp));
  if (packed()) ctx.save(kQueryOffsets, offsets_q), ctx.save(kKeyOffsets, offsets_kv);
  if (seed.defined()) ctx.save(kSeed, seed);
  return y;
}

at::Tensor CrossDotProductAttention::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  const auto &q = ctx.saved(kSavedQuery), &k = ctx.saved(kSavedKey), &v = ctx.saved(kSavedValue);
  auto dq = at::empty(q.sizes(), q.options()), dk = at::empty(k.sizes(), k.options()),
       dv = at::empty(v.sizes(), v.options());
  kernels::attention_backward(problem(ctx.saved(kQueryOffsets), ctx.saved(kKeyOffsets), ctx.saved(kSeed)),
                              qkv_views(q, k, v), query_views(ctx.saved(kOutput)), ctx.saved(kLogsumexp),
                              query_views(dy), qkv_views(dq, dk, dv));
  if (ctx.needs_extra_grad(kKey)) ctx.set_extra_input_grad(kKey, std::move(dk));
  if (ctx.needs_extra_grad(kValue)) ctx.set_extra_input_grad(kValue, std::move(dv));
  return ctx.needs_input_grad() ? dq : at::Tensor();
}

static const Register<CrossDotProductAttention> cross_dot_product_attention{
    "CrossDotProductAttention",
    {.summary = "Applies softmax attention to keys and values of another sequence: y = softmax(scale·q kᵀ + mask) v.",
     .details =
         "The input holds the query heads; the extra inputs hold the key heads and the value heads, and may have "
         "another length. Positions count from the first key with the mask \"causal\"; otherwise the last query is at "
         "the "
         "position of the last key. Each query head uses the key and value head of its group. Computed in "
         "float32 (float64 for float64). A query that sees no key gives 0. Dropout draws one seed from torch's "
         "generator in each call. With the format \"thd\" the extra inputs cu_seqlens_q and cu_seqlens_kv (int32 "
         "or int64) hold the row at which each sequence of queries and of keys starts, and the number of rows.",
     .shape = "Input: ``(s, *, w)`` with ``sbhd``, ``(*, s, w)`` with ``bshd``, ``(t, w)`` with ``thd``; ``w = "
              "num_attention_heads * kv_channels``.\nExtra inputs: key and value in the same format with last "
              "dimension ``num_gqa_groups * kv_channels``; with ``thd`` also cu_seqlens_q and cu_seqlens_kv "
              "``(sequences + 1)``.\nOutput: same as the input.",
     .example_inputs = "torch.randn(5, 3, 8), torch.randn(7, 3, 8), torch.randn(7, 3, 8)",
     .example_shape = "[5, 3, 8]"},
    {.num_attention_heads = 2, .kv_channels = 4, .window_size = std::vector<int64_t>{1, 1}}};

}  // namespace weft::ops
