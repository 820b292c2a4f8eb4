// torch's SDPA kernels for the CPU. They take views [N, H, T, D] of any strides with contiguous channels, share a key
// head among H/groups query heads, divide by zero without queries, and treat NaN scores as masked. They check no sizes:
// the operations do (ops/qkv.h).
#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/max.h>

#include <algorithm>
#include <atomic>

#include "weft/kernels/attention_tiers.h"
#include "weft/kernels/tiers.h"

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

/// Whether to compute on float32 copies, because ATen's GEMM of the dtype is slow. Both passes decide the same:
/// backward computes the scores again and subtracts the logsumexp of forward. MKL's float32 GEMMs of the two may round
/// a score differently, by a factor of about 2⁻²¹, which changes a probability by less than 1 % for scores up to
/// kMaxScore.
bool computes_in_float32(const DenseAttention& d) {
  constexpr double kMaxScore = 1e4;
  if (aten_gemm_is_native(d.in.q.scalar_type())) return false;
  const auto largest = [](const at::Tensor& t) {
    return at::linalg_vector_norm(t, 2, {-1}, /*keepdim=*/false, at::kFloat).max().item<double>();
  };
  return largest(d.in.q) * largest(d.in.k) * d.attention.scale <= kMaxScore;
}

bool is_below_float32(const DenseAttention& d) { return d.in.q.element_size() < 4; }

/// Whether `count` values are finite: no exponent has all bits set.
template <class Bits>
bool are_finite(const Bits* values, int64_t count, Bits exponent) {
  Bits special = 0;
  for (int64_t i = 0; i < count; ++i) special |= static_cast<Bits>(-((values[i] & exponent) == exponent));
  return special == 0;
}

/// Whether all values of [batch, T, …, D] with contiguous channels are finite.
template <class Bits>
bool is_finite(const at::Tensor& t, Bits exponent) {
  const auto inner = t.dim() == 5 ? t.size(3) : 1, inner_stride = t.dim() == 5 ? t.stride(3) : 0;
  const auto rows = t.size(0) * t.size(1), width = t.size(2) * inner * t.size(-1);
  const auto* data = static_cast<const Bits*>(t.const_data_ptr());
  std::atomic<bool> finite = true;
  constexpr int64_t kGrain = 1 << 15;  // values per task, at least
  const auto grain = at::divup(kGrain, std::max<int64_t>(width, 1));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end && finite; ++row)
      for (int64_t g = 0; g < t.size(2); ++g)
        for (int64_t h = 0; h < inner; ++h) {
          const auto* values =
              data + row / t.size(1) * t.stride(0) + row % t.size(1) * t.stride(1) + g * t.stride(2) + h * inner_stride;
          if (!are_finite(values, t.size(-1), exponent)) finite = false;
        }
  });
  return finite;
}

bool is_finite(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kDouble:
      return is_finite<uint64_t>(t, 0x7ff0000000000000);
    case at::kFloat:
      return is_finite<uint32_t>(t, 0x7f800000);
    case at::kHalf:
      return is_finite<uint16_t>(t, 0x7c00);
    default:
      return is_finite<uint16_t>(t, 0x7f80);  // bfloat16
  }
}

/// A range of the batch and of the groups of heads.
struct HeadRange {
  int64_t batch, batches, group, groups;

  /// Of [batch, T, groups, …].
  at::Tensor of(const at::Tensor& t) const { return t.narrow(0, batch, batches).narrow(2, group, groups); }
  Qkv of(const Qkv& t) const { return {of(t.q), of(t.k), of(t.v)}; }
  DenseAttention of(const DenseAttention& d) const {
    const auto heads = d.heads_per_group();
    const auto logsumexp = d.logsumexp.narrow(0, batch, batches).narrow(1, group * heads, groups * heads);
    return {d.attention, d.first_sequence + batch, of(d.in), of(d.out), logsumexp};
  }
  /// Attention of these heads on float32 copies of its inputs.
  DenseAttention in_float32(const DenseAttention& d) const {
    auto part = of(d);
    part.in = {part.in.q.to(at::kFloat), part.in.k.to(at::kFloat), part.in.v.to(at::kFloat)};
    return part;
  }
};

/// Calls run(range) for a few heads at a time: kHeadsPerThread bounds the imbalance of the threads and, as far as a
/// group of heads allows it, the memory of copies.
template <class Run>
void for_each_head_range(const DenseAttention& d, const Run& run) {
  constexpr int64_t kHeadsPerThread = 8;
  const auto wanted = kHeadsPerThread * at::get_num_threads(), all = d.in.q.size(2);
  const auto groups = std::clamp<int64_t>(wanted / d.heads_per_group(), 1, all);
  const auto batches = groups < all ? 1 : std::clamp<int64_t>(wanted / d.heads(), 1, d.batch());
  for (int64_t b = 0; b < d.batch(); b += batches)
    for (int64_t g = 0; g < all; g += groups)
      run(HeadRange{b, std::min(batches, d.batch() - b), g, std::min(groups, all - g)});
}

void backward(const DenseAttention& d, const at::Tensor& dout, const Qkv& grads) {
  const auto merge = merge_of(d);
  const auto grad = with_dense_channels(dout), out = with_dense_channels(d.out);
  // The kernel adds the gradients of the query heads of a group to each other in its dtype. Below float32 every query
  // head gets keys of its own here, and a sum in float32 is rounded once.
  const auto copies = is_below_float32(d) ? d.heads_per_group() : 1;
  const auto repeated = [&](const at::Tensor& t) { return copies == 1 ? t : t.repeat_interleave(copies, 1); };
  const auto summed = [&](const at::Tensor& t) { return copies == 1 ? t : t.unflatten(1, {-1, copies}).sum(2); };
  for (int64_t b = 0; b < calls(d, merge); ++b) {
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        query_heads(grad, merge, b), query_heads(d.in.q, merge, b), repeated(key_heads(d.in.k, merge, b)),
        repeated(key_heads(d.in.v, merge, b)), query_heads(out, merge, b), statistics(d.logsumexp, d, merge, b),
        /*dropout_p=*/0, d.attention.causal(), /*attn_mask=*/{}, d.attention.scale);
    store(grads.q, dq, merge, b);
    store(grads.k, summed(dk), merge, b);
    store(grads.v, summed(dv), merge, b);
  }
}

}  // namespace

bool sdpa_supports(const DenseAttention& d) { return is_finite(d.in.q) && is_finite(d.in.k); }

void sdpa_forward(const DenseAttention& d) {
  if (computes_in_float32(d))
    return for_each_head_range(d, [&](const HeadRange& range) { sdpa_forward(range.in_float32(d)); });
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
  if (computes_in_float32(d))
    return for_each_head_range(d, [&](const HeadRange& range) {
      auto part = range.in_float32(d);
      part.out = part.out.to(at::kFloat);
      backward(part, range.of(dout).to(at::kFloat), range.of(grads));
    });
  if (is_below_float32(d) && d.heads_per_group() > 1)  // which copies the keys
    return for_each_head_range(d,
                               [&](const HeadRange& range) { backward(range.of(d), range.of(dout), range.of(grads)); });
  backward(d, dout, grads);
}

}  // namespace weft::kernels
