#pragma once
#include "weft/kernels/attention.h"
#include "weft/ops/context.h"
#include "weft/ops/qkv.h"

// What self-attention and cross-attention share.

namespace weft::ops {

/// Which keys a query sees. With queries and keys of one length, both causal masks are the same.
enum class AttnMaskType { causal, no_mask, causal_bottom_right };

struct AttentionOptions {
  AttnMaskType mask;
  const std::optional<std::vector<int64_t>>& window;  // (left, right)
  std::optional<double> scale;
  double dropout;
};

/// Raises ValueError for options out of range.
void check_attention(std::string_view op, const AttentionOptions& options);

/// The problem without dropout and without offsets of packed sequences.
kernels::Attention make_attention(const QkvHeads& heads, const AttentionOptions& options);

/// A seed for one call on the device of `like`, from torch's generator: int64, no dimensions.
at::Tensor draw_seed(const at::Tensor& like);

/// [*, width] as [batch, s, width]. A view if the strides allow it.
at::Tensor batch_first(const at::Tensor& t, QkvFormat format);

/// log Σ exp of the scores, saved for backward.
Spec logsumexp_spec(const SequenceDims& dims, const QkvHeads& heads, at::ScalarType dtype);

/// Two GEMMs in forward, five in backward. Counts every pair of positions, as torch.utils.flop_counter does for SDPA;
/// packed sequences are counted as one.
Flops attention_flops(const QkvHeads& heads, const SequenceDims& queries, const c10::SymInt& keys, bool needs_grad);

namespace description {
inline constexpr const char* kAttnMaskType =
    "Keys that a query sees: ``\"causal\"`` those up to its own position, counted from the first key, "
    "``\"causal_bottom_right\"`` the same with the last query at the last key, ``\"no_mask\"`` all keys of its "
    "sequence.";
inline constexpr const char* kWindowSize =
    "Numbers of keys before and after its own position that a query sees, (left, right), where -1 means all; None "
    "means all.";
inline constexpr const char* kSoftmaxScale = "Factor of the scores; None means 1/√kv_channels.";
inline constexpr const char* kAttentionDropout =
    "Probability with which a softmax probability is set to zero in training.";
}  // namespace description

}  // namespace weft::ops

template <>
struct weft::EnumNames<weft::ops::AttnMaskType> {
  static constexpr std::array list{"causal", "no_mask", "causal_bottom_right"};
};
