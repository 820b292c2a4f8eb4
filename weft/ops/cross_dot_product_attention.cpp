#include "weft/ops/cross_dot_product_attention.h"

#include <ATen/ops/empty.h>

#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {

CrossDotProductAttention::CrossDotProductAttention(Options options)
    : options_(std::move(options)), config_("CrossDotProductAttention", options_) {}

void CrossDotProductAttention::check(const Spec& x, c10::ArrayRef<Spec> extra) const {
  const auto [heads, groups, d] = config_.heads();
  const auto &k = extra[kKey], &v = extra[kValue];
  TORCH_CHECK_VALUE(!x.sizes.empty() && same_size(x.sizes.back(), heads * d), "input has shape ", x.sizes,
                    ", expected last dimension ", heads * d, " = num_attention_heads·kv_channels, with ",
                    "num_attention_heads ", heads, " and kv_channels ", d, ".");
  TORCH_CHECK_VALUE(!k.sizes.empty() && same_size(k.sizes.back(), groups * d), "key has shape ", k.sizes,
                    ", expected last dimension ", groups * d, " = num_gqa_groups·kv_channels, with ", "num_gqa_groups ",
                    groups, " and kv_channels ", d, ".");
  TORCH_CHECK_VALUE(same_sizes(v.sizes, k.sizes), "value has shape ", v.sizes, ", expected that of the key, ", k.sizes,
                    ".");
  if (config_.packed()) {
    check_cu_seqlens(extra[kCuSeqlensQ], "cu_seqlens_q");
    check_cu_seqlens(extra[kCuSeqlensKv], "cu_seqlens_kv");
  }
  const auto queries = config_.dims(x.sizes), keys = config_.dims(k.sizes);
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
  out.saved[kLogsumexp] = config_.logsumexp_spec(x.sizes, dtype);
  if (config_.packed()) out.saved[kQueryOffsets] = extra[kCuSeqlensQ], out.saved[kKeyOffsets] = extra[kCuSeqlensKv];
  if (config_.drops(plan)) out.saved[kSeed] = Spec{{}, at::kLong};
  return out;
}

Flops CrossDotProductAttention::flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra) const {
  return config_.flops(x.sizes, extra[kKey].sizes, plan.needs_grad);
}

kernels::Qkv CrossDotProductAttention::qkv_views(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  const auto head_views = [&](const at::Tensor& t) {
    return config_.batch_first(t).unflatten(2, {config_.heads().groups, config_.heads().head_dim});
  };
  return {config_.query_views(q), head_views(k), head_views(v)};
}

at::Tensor CrossDotProductAttention::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  std::vector<Spec> specs;
  for (int i = 0; i < extra_inputs(); ++i) specs.push_back(Spec::of(ctx.extra_input(i)));
  check(Spec::of(x), specs);
  auto q = as_dtype(x, ctx.dtype(x.scalar_type()));
  auto k = as_dtype(ctx.extra_input(kKey), q.scalar_type()), v = as_dtype(ctx.extra_input(kValue), q.scalar_type());
  const auto offsets_q = config_.packed() ? ctx.extra_input(kCuSeqlensQ) : at::Tensor(),
             offsets_kv = config_.packed() ? ctx.extra_input(kCuSeqlensKv) : at::Tensor();
  const auto seed = config_.drops(ctx.plan()) ? draw_seed(q) : at::Tensor();
  auto y = at::empty(x.sizes(), q.options());
  auto logsumexp = kernels::attention_forward(config_.problem(offsets_q, offsets_kv, seed), qkv_views(q, k, v),
                                              config_.query_views(y));
  if (!ctx.needs_grad()) return y;
  ctx.save(kSavedQuery, std::move(q));
  ctx.save(kSavedKey, std::move(k));
  ctx.save(kSavedValue, std::move(v));
  ctx.save(kOutput, y);
  ctx.save(kLogsumexp, std::move(logsumexp));
  if (config_.packed()) ctx.save(kQueryOffsets, offsets_q), ctx.save(kKeyOffsets, offsets_kv);
  if (seed.defined()) ctx.save(kSeed, seed);
  return y;
}

at::Tensor CrossDotProductAttention::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  const auto &q = ctx.saved(kSavedQuery), &k = ctx.saved(kSavedKey), &v = ctx.saved(kSavedValue);
  auto dq = at::empty(q.sizes(), q.options()), dk = at::empty(k.sizes(), k.options()),
       dv = at::empty(v.sizes(), v.options());
  kernels::attention_backward(config_.problem(ctx.saved(kQueryOffsets), ctx.saved(kKeyOffsets), ctx.saved(kSeed)),
                              qkv_views(q, k, v), config_.query_views(ctx.saved(kOutput)), ctx.saved(kLogsumexp),
                              config_.query_views(dy), qkv_views(dq, dk, dv));
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
    {.num_attention_heads = 2,
     .kv_channels = 4,
     .window_size = std::vector<int64_t>{1, 1},
     .qkv_format = QkvFormat::sbhd}};

}  // namespace weft::ops
