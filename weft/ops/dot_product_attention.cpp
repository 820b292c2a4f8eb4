#include "weft/ops/dot_product_attention.h"

#include <ATen/ops/empty.h>

#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {

DotProductAttention::DotProductAttention(Options options)
    : options_(std::move(options)), config_("DotProductAttention", options_) {}

void DotProductAttention::check(const Spec& x, c10::ArrayRef<Spec> extra) const {
  const auto [heads, groups, d] = config_.heads();
  const auto width = (heads + 2 * groups) * d;
  TORCH_CHECK_VALUE(!x.sizes.empty() && same_size(x.sizes.back(), width), "input has shape ", x.sizes,
                    ", expected last dimension ", width,
                    " = (num_attention_heads + 2·num_gqa_groups)·kv_channels, with num_attention_heads ", heads,
                    ", num_gqa_groups ", groups, " and kv_channels ", d, ".");
  config_.dims(x.sizes);  // raises for more than one sequence without a format
  if (config_.packed()) check_cu_seqlens(extra[0]);
}

Inferred DotProductAttention::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra,
                                    c10::ArrayRef<Spec>) const {
  check(x, extra);
  const auto dtype = plan.dtype(x.dtype);
  Inferred out{.y = x.with_last(output_width()).as(dtype)};
  out.saved.resize(5);
  if (!plan.needs_input_grad) return out;
  out.saved[kInput] = saved_input(x, dtype);
  out.saved[kOutput] = out.y;
  out.saved[kLogsumexp] = config_.logsumexp_spec(x.sizes, dtype);
  if (config_.packed()) out.saved[kOffsets] = extra[0];
  if (config_.drops(plan)) out.saved[kSeed] = Spec{{}, at::kLong};
  return out;
}

Flops DotProductAttention::flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>) const {
  return config_.flops(x.sizes, x.sizes, plan.needs_grad);
}

kernels::Qkv DotProductAttention::qkv_views(const at::Tensor& x) const {
  const auto [heads, groups, d] = config_.heads();
  const auto rows = config_.batch_first(x);
  if (options_.qkv_layout == QkvLayout::concatenated) {
    const auto part = [&](int64_t first, int64_t count) { return rows.narrow(2, first * d, count * d); };
    return {part(0, heads).unflatten(2, {groups, heads / groups, d}), part(heads, groups).unflatten(2, {groups, d}),
            part(heads + groups, groups).unflatten(2, {groups, d})};
  }
  const auto per_group = heads / groups;
  const auto grouped = rows.unflatten(2, {groups, per_group + 2, d});
  return {grouped.narrow(3, 0, per_group), grouped.select(3, per_group), grouped.select(3, per_group + 1)};
}

at::Tensor DotProductAttention::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  std::vector<Spec> specs;
  if (config_.packed()) specs.push_back(Spec::of(ctx.extra_input(0)));
  check(Spec::of(x), specs);
  auto input = as_dtype(x, ctx.dtype(x.scalar_type()));
  const auto offsets = config_.packed() ? ctx.extra_input(0) : at::Tensor();
  const auto seed = config_.drops(ctx.plan()) ? draw_seed(input) : at::Tensor();
  auto sizes = x.sizes().vec();
  sizes.back() = output_width();
  auto y = at::empty(sizes, input.options());
  auto logsumexp =
      kernels::attention_forward(config_.problem(offsets, offsets, seed), qkv_views(input), config_.query_views(y));
  if (!ctx.needs_input_grad()) return y;
  ctx.save(kInput, std::move(input));
  ctx.save(kOutput, y);
  ctx.save(kLogsumexp, std::move(logsumexp));
  if (config_.packed()) ctx.save(kOffsets, offsets);
  if (seed.defined()) ctx.save(kSeed, seed);
  return y;
}

at::Tensor DotProductAttention::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (!ctx.needs_input_grad()) return {};
  const auto& x = ctx.saved(kInput);
  auto dx = at::empty(x.sizes(), x.options());
  const auto& offsets = ctx.saved(kOffsets);
  kernels::attention_backward(config_.problem(offsets, offsets, ctx.saved(kSeed)), qkv_views(x),
                              config_.query_views(ctx.saved(kOutput)), ctx.saved(kLogsumexp), config_.query_views(dy),
                              qkv_views(dx));
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
    {.num_attention_heads = 2,
     .kv_channels = 2,
     .num_gqa_groups = 1,
     .window_size = std::vector<int64_t>{1, -1},
     .qkv_format = QkvFormat::sbhd}};

}  // namespace weft::ops
