#pragma once
#include "weft/kernels/attention.h"
#include "weft/ops/operation.h"
#include "weft/ops/qkv.h"

// What self-attention and cross-attention share.

namespace weft::ops {

/// Which keys a query sees. With queries and keys of one length, both causal masks are the same.
enum class AttnMaskType { causal, no_mask, causal_bottom_right };

using WindowSize = std::optional<std::vector<int64_t>>;  // (left, right)

/// The options that both operations have.
class AttentionConfig {
 public:
  /// Raises ValueError for options out of range.
  template <class Options>
  AttentionConfig(std::string_view op, const Options& o)
      : heads_(make_heads(op, o.num_attention_heads, o.num_gqa_groups, o.kv_channels)),
        format_(o.qkv_format),
        dropout_(o.attention_dropout),
        attention_(make_attention(op, o.attn_mask_type, o.window_size, o.softmax_scale)) {}

  const QkvHeads& heads() const { return heads_; }
  /// Whether sequences are packed, with their offsets as extra inputs.
  bool packed() const { return format_ == QkvFormat::thd; }
  bool drops_in_training() const { return dropout_ > 0; }
  bool drops(const OpPlan& plan) const { return plan.training && drops_in_training(); }
  SequenceDims dims(c10::SymIntArrayRef sizes) const { return {format_, sizes}; }

  /// The problem of one call; offsets and seed may be undefined.
  kernels::Attention problem(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_kv,
                             const at::Tensor& seed) const;
  kernels::TierChoice tier(const TierQuery& q, bool equal_lengths) const;

  /// [*, width] as [batch, s, width]. A view if the strides allow it.
  at::Tensor batch_first(const at::Tensor& t) const;
  /// The query heads of [*, heads·d] as [batch, s, groups, heads / groups, d].
  at::Tensor query_views(const at::Tensor& t) const;

  /// log Σ exp of the scores of queries of `sizes`, saved for backward.
  Spec logsumexp_spec(c10::SymIntArrayRef sizes, at::ScalarType dtype) const;
  /// Two GEMMs in forward, five in backward, for queries and keys of these sizes. Counts every pair of positions, as
  /// torch.utils.flop_counter does for SDPA; packed sequences are counted as one.
  Flops flops(c10::SymIntArrayRef queries, c10::SymIntArrayRef keys, bool needs_grad) const;

 private:
  /// The problem without dropout and without offsets.
  kernels::Attention make_attention(std::string_view op, AttnMaskType mask, const WindowSize& window,
                                    std::optional<double> scale) const;

  QkvHeads heads_;
  std::optional<QkvFormat> format_;
  double dropout_;
  kernels::Attention attention_;
};

/// A seed for one call on the device of `like`, from torch's generator: int64, no dimensions.
at::Tensor draw_seed(const at::Tensor& like);

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
