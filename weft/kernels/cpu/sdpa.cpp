// torch's SDPA kernels for the CPU. They take views [N, H, T, D] of any strides with contiguous channels, share a key
// head among H/groups query heads, and divide by zero without queries.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include "weft/kernels/attention_tiers.h"

namespace weft::kernels {
namespace {

/// How the dimensions batch, group and head in group become the dimensions N and H of a call.
enum class Merge {
  heads,   // N = batch, H = group and head
  groups,  // N = batch and group, H = head
  none,    // one call per entry of the batch: N = group, H = head
};

Merge merge_of(const DenseAttention& d) {
  const auto& q = d.in.q;
  if (q.size(2) == 1 || q.size(3) == 1 || q.stride(2) == q.size(3) * q.stride(3)) return Merge::heads;
  return q.stride(0) == q.size(2) * q.stride(2) ? Merge::groups : Merge::none;
}

/// [batch, T, groups, heads, D] as [N, H, T, D]; of `Merge::none` for entry `b`. Copies if the strides allow no view.
at::Tensor query_heads(const at::Tensor& t, Merge merge, int64_t b) {
  if (merge == Merge::none) return t.select(0, b).permute({1, 2, 0, 3});
  const auto heads = t.permute({0, 2, 3, 1, 4});
  return merge == Merge::heads ? heads.flatten(1, 2) : heads.flatten(0, 1);
}
/// The same for [batch, T, groups, D].
at::Tensor key_heads(const at::Tensor& t, Merge merge, int64_t b) {
  if (merge == Merge::none) return t.select(0, b).permute({1, 0, 2}).unsqueeze(1);
  const auto heads = t.permute({0, 2, 1, 3});
  return merge == Merge::heads ? heads : heads.flatten(0, 1).unsqueeze(1);
}
/// The same for logsumexp, [batch, heads, T].
at::Tensor statistics(const at::Tensor& t, const DenseAttention& d, Merge merge, int64_t b) {
  if (merge == Merge::heads) return t;
  const auto heads = t.unflatten(1, {d.in.q.size(2), d.heads_per_group()});
  return merge == Merge::none ? heads.select(0, b) : heads.flatten(0, 1);
}

/// Copies [N, H, T, D] back to [batch, T, groups, heads, D], or without `heads` to [batch, T, groups, D].
void store(const at::Tensor& to, const at::Tensor& from, Merge merge, int64_t b) {
  const bool queries = to.dim() == 5;
  auto target = merge == Merge::none ? to.select(0, b).unsqueeze(0) : to;
  target = queries ? target.permute({0, 2, 3, 1, 4}) : target.permute({0, 2, 1, 3});
  target.copy_(from.reshape(target.sizes()));
}

at::Tensor with_dense_channels(const at::Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

int64_t calls(const DenseAttention& d, Merge merge) { return merge == Merge::none ? d.batch() : 1; }

}  // namespace

void sdpa_forward(const DenseAttention& d) {
  const auto merge = merge_of(d);
  for (int64_t b = 0; b < calls(d, merge); ++b) {
    const auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
        query_heads(d.in.q, merge, b), key_heads(d.in.k, merge, b), key_heads(d.in.v, merge, b), /*dropout_p=*/0,
        d.attention.causal(), /*attn_mask=*/{}, d.attention.scale);
    store(d.out, out, merge, b);
    const auto whole = merge == Merge::none ? d.logsumexp.select(0, b).unsqueeze(0) : d.logsumexp;
    whole.copy_(logsumexp.reshape(whole.sizes()));
  }
}

void sdpa_backward(const DenseAttention& d, const at::Tensor& dout, const Qkv& grads) {
  const auto merge = merge_of(d);
  const auto grad = with_dense_channels(dout), out = with_dense_channels(d.out);
  for (int64_t b = 0; b < calls(d, merge); ++b) {
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        query_heads(grad, merge, b), query_heads(d.in.q, merge, b), key_heads(d.in.k, merge, b),
        key_heads(d.in.v, merge, b), query_heads(out, merge, b), statistics(d.logsumexp, d, merge, b),
        /*dropout_p=*/0, d.attention.causal(), /*attn_mask=*/{}, d.attention.scale);
    store(grads.q, dq, merge, b);
    store(grads.k, dk, merge, b);
    store(grads.v, dv, merge, b);
  }
}

}  // namespace weft::kernels
