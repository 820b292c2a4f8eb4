#pragma once
#include <ATen/core/Tensor.h>

#include "weft/kernels/tier.h"

namespace weft::kernels {

/// Softmax attention of one call. Query i of Tq and key j of Tk have the distance
///   d = (j + key_offset) - (i + query_offset + shift),  shift = Tk - Tq if `bottom_right`, otherwise 0,
/// and i sees j if -left <= d <= right; a bound of -1 is none. With packed sequences Tq and Tk are those of a sequence.
/// `query_offset` and `key_offset` are the positions of the first query and key, for parts of longer sequences.
struct Attention {
  double scale = 1;
  int64_t left = -1, right = -1;
  bool bottom_right = false;
  int64_t query_offset = 0, key_offset = 0;
  /// Probabilities are dropped with this probability, and the others divided by 1 - dropout. Whether one is dropped
  /// depends on the value of `seed` (int64, one element), on the sequence, the head and both positions, and on nothing
  /// else.
  double dropout = 0;
  at::Tensor seed = {};
  /// Offsets of packed sequences in dimension T of a batch of 1 (sequence_offsets.h); undefined: each entry of the
  /// batch is a sequence.
  at::Tensor cu_seqlens_q = {}, cu_seqlens_kv = {};

  bool causal() const { return left < 0 && right == 0; }
  bool sees_all() const { return left < 0 && right < 0; }
};

/// Views of any strides, e.g. of one packed buffer: q [batch, Tq, groups, heads/groups, head_dim], k and v
/// [batch, Tk, groups, head_dim], of one dtype. Each key and value head serves heads/groups query heads.
struct Qkv {
  at::Tensor q, k, v;
};

/// out = softmax(scale·q kᵀ + mask) v, computed in float32 (float64 for float64). Fills `out`, a view of the sizes and
/// dtype of q. Returns log Σ exp of the scaled scores of each query, [batch, heads, Tq] in float32 or float64. A query
/// that sees no key has out = 0 and logsumexp = -inf.
at::Tensor attention_forward(const Attention& attention, const Qkv& in, const at::Tensor& out);

/// With p the probabilities and δ = Σ_d dout·out:  ds = p·(dout vᵀ - δ);  dq = scale·ds k;  dk = scale·dsᵀ q;
/// dv = pᵀ dout. Fills `grads`, views of the sizes and dtypes of `in`. `dout` has the sizes of `out`.
void attention_backward(const Attention& attention, const Qkv& in, const at::Tensor& out, const at::Tensor& logsumexp,
                        const at::Tensor& dout, const Qkv& grads);

/// The tier for queries and keys of equal or of unequal lengths. The AMX tier takes bfloat16 without dropout. The
/// vector tiers are torch's SDPA kernels for the CPU, which have no window, no dropout from a seed and no causal mask
/// with other alignments.
TierChoice choose_attention_tier(const Attention& attention, c10::DeviceType device, at::ScalarType dtype,
                                 bool equal_lengths);

}  // namespace weft::kernels
