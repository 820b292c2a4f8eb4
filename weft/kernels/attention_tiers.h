#pragma once
#include "weft/kernels/attention.h"

// The implementations of attention, for the file that chooses one. Not installed.

namespace weft::kernels {

/// Sequences of equal lengths, one per entry of the batch. The sequences of a call are numbered for dropout.
struct DenseAttention {
  const Attention& attention;
  int64_t first_sequence;
  Qkv in;
  at::Tensor out, logsumexp;

  int64_t batch() const { return in.q.size(0); }
  int64_t queries() const { return in.q.size(1); }
  int64_t keys() const { return in.k.size(1); }
  int64_t heads() const { return in.q.size(2) * in.q.size(3); }
  /// Heads that share a key head.
  int64_t heads_per_group() const { return in.q.size(3); }
  /// The distance between query 0 and key 0.
  int64_t first_distance() const {
    const auto shift = attention.bottom_right ? keys() - queries() : 0;
    return attention.key_offset - attention.query_offset - shift;
  }
};

/// A block of the matrix of scores.
struct ScoreBlock {
  int64_t batch, batches, query, queries, key, keys;
};

/// The factor of each probability of the block, [batches, groups, heads/groups, queries, keys] in `dtype`: 0 for a
/// dropped one, otherwise 1/(1 - dropout).
at::Tensor dropout_factors(const DenseAttention& dense, const ScoreBlock& block, at::ScalarType dtype);

/// Whether all queries and keys are finite. For others, torch's kernels may return 0 where a score is NaN.
bool sdpa_supports(const DenseAttention& dense);
/// torch's SDPA kernels. There is at least one query and one key.
void sdpa_forward(const DenseAttention& dense);
void sdpa_backward(const DenseAttention& dense, const at::Tensor& dout, const Qkv& grads);

namespace amx {
/// Take bfloat16 with contiguous channels in every tensor, a positive scale and no dropout. There is at least one query
/// and one key.
void attention_forward(const DenseAttention& dense);
void attention_backward(const DenseAttention& dense, const at::Tensor& dout, const Qkv& grads);
}  // namespace amx

namespace ref {
/// ATen calls on blocks of queries: temporary memory is proportional to the number of keys.
void attention_forward(const DenseAttention& dense);
void attention_backward(const DenseAttention& dense, const at::Tensor& dout, const Qkv& grads);
}  // namespace ref

}  // namespace weft::kernels
