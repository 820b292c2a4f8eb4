#include "weft/kernels/attention.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

#include "weft/core/value.h"
#include "weft/kernels/attention_tiers.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/launch.h"
#include "weft/kernels/opmath.h"
#include "weft/kernels/sequence_offsets.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

Qkv host_views(const Qkv& t) { return {host_view(t.q), host_view(t.k), host_view(t.v)}; }

Qkv narrow(const Qkv& t, int64_t query, int64_t queries, int64_t key, int64_t keys) {
  return {t.q.narrow(1, query, queries), t.k.narrow(1, key, keys), t.v.narrow(1, key, keys)};
}

/// Calls run(dense, query, key) for all sequences at once, or for each packed sequence, where `query` and `key` are the
/// rows at which it starts.
template <class Run>
void for_each_part(const Attention& a, const Qkv& in, const at::Tensor& out, const at::Tensor& logsumexp,
                   const Run& run) {
  if (!a.cu_seqlens_q.defined()) return run(DenseAttention{a, 0, in, out, logsumexp}, 0, 0);
  const bool same = a.cu_seqlens_q.is_same(a.cu_seqlens_kv);
  const SequenceOffsets queries(a.cu_seqlens_q, in.q.size(1), same ? "cu_seqlens" : "cu_seqlens_q");
  const SequenceOffsets keys(a.cu_seqlens_kv, in.k.size(1), same ? "cu_seqlens" : "cu_seqlens_kv");
  TORCH_CHECK_VALUE(queries.sequences() == keys.sequences(), "cu_seqlens_q has ", queries.sequences(),
                    " sequences, cu_seqlens_kv ", keys.sequences(), "; expected the same number.");
  for (int64_t i = 0; i < queries.sequences(); ++i) {
    const auto query = queries.begin(i), count = queries.rows(i);
    run(DenseAttention{a, i, narrow(in, query, count, keys.begin(i), keys.rows(i)), out.narrow(1, query, count),
                       logsumexp.narrow(2, query, count)},
        query, keys.begin(i));
  }
}

/// Why a machine with AMX does not use it; empty if it does.
std::string amx_attention_rejection(const Attention& a, c10::DeviceType device, at::ScalarType dtype) {
  auto reason = amx_rejection(device, dtype);
  if (!reason.empty()) return reason;
  if (a.dropout > 0) return "amx: not used in training with attention_dropout. Set attention_dropout to 0 to use it.";
  return a.scale > 0 ? "" : "amx: not used for a softmax_scale that is not positive.";
}

/// The tier of torch's SDPA kernels, or `ref`.
TierChoice choose_sdpa_tier(const Attention& a, c10::DeviceType device, at::ScalarType dtype, bool equal_lengths) {
  const auto best = machine_tier() == Tier::amx ? Tier::avx512 : machine_tier();
  if (best == Tier::ref) return {};
  const auto rejected = [&](const std::string& why) {
    return TierChoice{Tier::ref, c10::str(tier_name(best), ": not used ", why)};
  };
  if (!in_host_memory(device))
    return rejected(c10::str("on ", c10::DeviceTypeName(device, /*lower_case=*/true),
                             " (torch's SDPA kernel that it calls runs on the CPU)."));
  if (!is_compute_dtype(dtype)) return rejected(c10::str("for ", dtype_name(dtype), "."));
  if (a.dropout > 0)
    return rejected(
        "in training with attention_dropout (torch's SDPA kernel draws no mask that backward can draw again). Set "
        "attention_dropout to 0 to use it.");
  if (!(a.scale > 0))
    return rejected("for a softmax_scale that is not positive (torch's SDPA kernel scales the -inf of masked scores).");
  if (!a.causal() && !a.sees_all())
    return rejected("with window_size (torch's SDPA kernel has no sliding window). Leave it None to use it.");
  const bool aligned = a.query_offset == a.key_offset && (!a.bottom_right || equal_lengths);
  if (a.causal() && !aligned)
    return rejected(
        "with a causal mask for queries and keys of unequal lengths that is aligned at their ends (torch's SDPA kernel "
        "aligns it at their starts).");
  return {best};
}

bool has_dense_channels(const at::Tensor& t) { return is_plain_strided(t) && (t.size(-1) <= 1 || t.stride(-1) == 1); }
bool has_dense_channels(const Qkv& t) {
  return has_dense_channels(t.q) && has_dense_channels(t.k) && has_dense_channels(t.v);
}

/// The tier of one part. `dense_results`: whether the results have contiguous channels.
Tier tier_of(const DenseAttention& d, bool dense_results) {
  if (!has_dense_channels(d.in)) return Tier::ref;
  const auto choose = dense_results ? choose_attention_tier : choose_sdpa_tier;
  return choose(d.attention, d.in.q.device().type(), d.in.q.scalar_type(), d.queries() == d.keys()).tier;
}

void forward_part(const DenseAttention& d) {
  switch (tier_of(d, has_dense_channels(d.out))) {
    case Tier::amx:
      return amx::attention_forward(d);
    case Tier::ref:
      return ref::attention_forward(d);
    default:
      return sdpa_supports(d) ? sdpa_forward(d) : ref::attention_forward(d);
  }
}

void backward_part(const DenseAttention& d, const at::Tensor& dout, const Qkv& grads) {
  switch (tier_of(d, has_dense_channels(grads) && has_dense_channels(d.out))) {
    case Tier::amx:
      return amx::attention_backward(d, has_dense_channels(dout) ? dout : dout.clone(at::MemoryFormat::Contiguous),
                                     grads);
    case Tier::ref:
      return ref::attention_backward(d, dout, grads);
    default:
      return sdpa_backward(d, dout, grads);
  }
}

/// Raises unless the sizes fit: the kernels do not compare them.
void check_sizes(const Qkv& in) {
  const auto &q = in.q, &k = in.k;
  const bool fits =
      k.sizes() == in.v.sizes() && k.size(0) == q.size(0) && k.size(2) == q.size(2) && k.size(3) == q.size(4);
  TORCH_CHECK_VALUE(fits, "attention: queries have shape ", q.sizes(), ", keys ", k.sizes(), " and values ",
                    in.v.sizes(), "; expected equal batches, groups and channels, and as many keys as values.");
  for (const auto* t : {&in.q, &in.k, &in.v}) check_elements(*t, t->numel(), "an input of attention");
}

}  // namespace

TierChoice choose_attention_tier(const Attention& a, c10::DeviceType device, at::ScalarType dtype, bool equal_lengths) {
  auto next = choose_sdpa_tier(a, device, dtype, equal_lengths);
  if (machine_tier() != Tier::amx) return next;
  const auto reason = amx_attention_rejection(a, device, dtype);
  return reason.empty() ? TierChoice{Tier::amx} : after_rejection(reason, std::move(next));
}

at::Tensor attention_forward(const Attention& attention, const Qkv& in, const at::Tensor& out) {
  check_sizes(in);
  const auto dtype = at::toOpMathType(in.q.scalar_type());
  const auto logsumexp =
      at::empty({in.q.size(0), in.q.size(2) * in.q.size(3), in.q.size(1)}, in.q.options().dtype(dtype));
  if (in.q.is_meta()) return logsumexp;
  launch([=] {
    for_each_part(attention, host_views(in), host_view(out), host_view(logsumexp),
                  [](const DenseAttention& dense, int64_t, int64_t) {
                    if (dense.in.q.numel() == 0) return;
                    if (dense.keys() == 0) {
                      dense.out.zero_();
                      dense.logsumexp.fill_(-std::numeric_limits<double>::infinity());
                    } else {
                      forward_part(dense);
                    }
                  });
  });
  return logsumexp;
}

void attention_backward(const Attention& attention, const Qkv& in, const at::Tensor& out, const at::Tensor& logsumexp,
                        const at::Tensor& dout, const Qkv& grads) {
  if (in.q.is_meta()) return;
  check_sizes(in);
  check_elements(out, in.q.numel(), "the saved output of attention");
  check_elements(dout, in.q.numel(), "the gradient of attention");
  check_elements(logsumexp, in.q.numel() / std::max<int64_t>(in.q.size(4), 1), "the saved logsumexp of attention");
  launch([=] {
    const auto statistics = host_view(logsumexp.contiguous()), grad = host_view(dout);
    const auto parts = host_views(grads);
    for_each_part(attention, host_views(in), host_view(out), statistics,
                  [&](const DenseAttention& dense, int64_t query, int64_t key) {
                    const auto part = narrow(parts, query, dense.queries(), key, dense.keys());
                    if (dense.in.q.numel() == 0 || dense.keys() == 0) {
                      for (const auto* t : {&part.q, &part.k, &part.v}) t->zero_();
                      return;
                    }
                    backward_part(dense, as_dtype(grad.narrow(1, query, dense.queries()), in.q.scalar_type()), part);
                  });
  });
}

}  // namespace weft::kernels
