#include "weft/ops/attention.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

namespace weft::ops {

void check_attention(std::string_view op, const AttentionOptions& options) {
  const auto p = options.dropout, scale = options.scale.value_or(1);
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, op, ": attention_dropout is ", p, ", expected 0 to 1.");
  TORCH_CHECK_VALUE(std::isfinite(scale), op, ": softmax_scale is ", scale, ", expected a finite number or None.");
  if (!options.window) return;
  const auto& window = *options.window;
  TORCH_CHECK_VALUE(window.size() == 2 && window[0] >= -1 && window[1] >= -1, op, ": window_size is ",
                    at::IntArrayRef(window), ", expected two numbers (left, right) of 0 or more, or -1 for all keys.");
}

kernels::Attention make_attention(const QkvHeads& heads, const AttentionOptions& options) {
  kernels::Attention a;
  a.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(heads.head_dim)));
  constexpr int64_t kAll = int64_t{1} << 40;  // more than any sequence has, so that sums with positions do not overflow
  if (options.window) a.left = std::min((*options.window)[0], kAll), a.right = std::min((*options.window)[1], kAll);
  if (options.mask != AttnMaskType::no_mask) a.right = 0;
  a.bottom_right = options.mask != AttnMaskType::causal;
  return a;
}

at::Tensor draw_seed(const at::Tensor& like) { return at::empty({}, like.options().dtype(at::kLong)).random_(); }

at::Tensor batch_first(const at::Tensor& t, QkvFormat format) {
  const auto sizes = SequenceDims(format, t.sym_sizes()).sizes(t.size(-1));
  const auto whole = t.reshape(sizes).permute({0, 2, 1, 3});  // one of the first two sizes is 1
  return whole.reshape({sizes[0] * sizes[2], sizes[1], sizes[3]});
}

Flops attention_flops(const QkvHeads& heads, const SequenceDims& queries, const c10::SymInt& keys, bool needs_grad) {
  const auto gemm = queries.outer * queries.inner * heads.heads * queries.length * keys * (2 * heads.head_dim);
  return {gemm * 2, needs_grad ? gemm * 5 : c10::SymInt(0)};
}

Spec logsumexp_spec(const SequenceDims& dims, const QkvHeads& heads, at::ScalarType dtype) {
  return {{dims.outer * dims.inner, heads.heads, dims.length}, at::toOpMathType(dtype)};
}

}  // namespace weft::ops
