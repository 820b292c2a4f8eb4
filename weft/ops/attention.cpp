#include "weft/ops/attention.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

namespace weft::ops {

kernels::Attention AttentionConfig::make_attention(std::string_view op, AttnMaskType mask, const WindowSize& window,
                                                   std::optional<double> scale) const {
  constexpr int64_t kAll = int64_t{1} << 40;  // more than any sequence has, so that sums with positions do not overflow
  TORCH_CHECK_VALUE(dropout_ >= 0 && dropout_ <= 1, op, ": attention_dropout is ", dropout_, ", expected 0 to 1.");
  kernels::Attention a;
  a.scale = scale.value_or(1 / std::sqrt(static_cast<double>(heads_.head_dim)));
  TORCH_CHECK_VALUE(std::isfinite(a.scale), op, ": softmax_scale is ", a.scale, ", expected a finite number or None.");
  if (window) {
    TORCH_CHECK_VALUE(window->size() == 2 && window->at(0) >= -1 && window->at(1) >= -1, op, ": window_size is ",
                      at::IntArrayRef(*window),
                      ", expected two numbers (left, right) of 0 or more, or -1 for all keys.");
    a.left = std::min(window->at(0), kAll), a.right = std::min(window->at(1), kAll);
  }
  if (mask != AttnMaskType::no_mask) a.right = 0;
  a.bottom_right = mask != AttnMaskType::causal;
  return a;
}

kernels::Attention AttentionConfig::problem(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_kv,
                                            const at::Tensor& seed) const {
  auto a = attention_;
  a.dropout = seed.defined() ? dropout_ : 0;
  a.seed = seed;
  a.cu_seqlens_q = cu_seqlens_q, a.cu_seqlens_kv = cu_seqlens_kv;
  return a;
}

kernels::TierChoice AttentionConfig::tier(const TierQuery& q, bool equal_lengths) const {
  auto a = attention_;
  if (q.training) a.dropout = dropout_;
  return kernels::choose_attention_tier(a, q.device, q.dtype, equal_lengths);
}

at::Tensor AttentionConfig::batch_first(const at::Tensor& t) const {
  const auto sizes = dims(t.sym_sizes()).sizes(t.size(-1));
  const auto whole = t.reshape(sizes).permute({0, 2, 1, 3});  // one of the first two sizes is 1
  return whole.reshape({sizes[0] * sizes[2], sizes[1], sizes[3]});
}

at::Tensor AttentionConfig::query_views(const at::Tensor& t) const {
  const auto [heads, groups, d] = heads_;
  return batch_first(t).unflatten(2, {groups, heads / groups, d});
}

Spec AttentionConfig::logsumexp_spec(c10::SymIntArrayRef sizes, at::ScalarType dtype) const {
  const auto d = dims(sizes);
  return {{d.outer * d.inner, heads_.heads, d.length}, at::toOpMathType(dtype)};
}

Flops AttentionConfig::flops(c10::SymIntArrayRef queries, c10::SymIntArrayRef keys, bool needs_grad) const {
  const auto q = dims(queries);
  const auto gemm = q.outer * q.inner * heads_.heads * q.length * dims(keys).length * (2 * heads_.head_dim);
  return {gemm * 2, needs_grad ? gemm * 5 : c10::SymInt(0)};
}

at::Tensor draw_seed(const at::Tensor& like) { return at::empty({}, like.options().dtype(at::kLong)).random_(); }

}  // namespace weft::ops
