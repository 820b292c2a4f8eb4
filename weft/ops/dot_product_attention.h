#pragma once
#include "weft/ops/attention.h"
#include "weft/ops/operation.h"

namespace weft::ops {

/// Softmax attention of the heads in a packed QKV activation: for each query head
///   y = softmax(softmax_scale·q kᵀ + mask) v,
/// with the key and value head of its group. Saves x, y and the logsumexp of the scores, nothing of size s².
class DotProductAttention final : public Op<DotProductAttention> {
 public:
  struct Options {
    int64_t num_attention_heads = 0;
    int64_t kv_channels = 0;
    std::optional<int64_t> num_gqa_groups = {};
    AttnMaskType attn_mask_type = AttnMaskType::causal;
    std::optional<std::vector<int64_t>> window_size = {};
    std::optional<double> softmax_scale = {};
    double attention_dropout = 0;
    std::optional<QkvFormat> qkv_format = {};
    QkvLayout qkv_layout = QkvLayout::group_interleaved;
    static constexpr auto fields() {
      return std::tuple{
          Field{"num_attention_heads", &Options::num_attention_heads, description::kNumAttentionHeads,
                ParamKind::required},
          Field{"kv_channels", &Options::kv_channels, description::kKvChannels, ParamKind::required},
          Field{"num_gqa_groups", &Options::num_gqa_groups, description::kNumGqaGroups},
          Field{"attn_mask_type", &Options::attn_mask_type, description::kAttnMaskType},
          Field{"window_size", &Options::window_size, description::kWindowSize},
          Field{"softmax_scale", &Options::softmax_scale, description::kSoftmaxScale},
          Field{"attention_dropout", &Options::attention_dropout, description::kAttentionDropout},
          Field{"qkv_format", &Options::qkv_format, description::kQkvFormat},
          Field{"qkv_layout", &Options::qkv_layout,
                "Order of the heads: ``\"group_interleaved\"`` for each group its query heads, key and value; "
                "``\"concatenated\"`` all queries, keys, values."}};
    }
  };
  enum Saved { kInput, kOutput, kLogsumexp, kOffsets, kSeed };

  explicit DotProductAttention(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "DotProductAttention"; }
  int extra_inputs() const override { return config_.packed() ? 1 : 0; }
  bool is_index(int) const override { return true; }
  bool depends_on_training() const override { return config_.drops_in_training(); }
  std::vector<std::string> saved_names() const override {
    return {"input", "output", "logsumexp", "cu_seqlens", "seed"};
  }
  DtypeRule dtype_rule() const override { return DtypeRule::autocast; }
  kernels::TierChoice kernel(const TierQuery& q) const override { return config_.tier(q, /*equal_lengths=*/true); }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra, c10::ArrayRef<Spec>) const override;
  Flops flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  void check(const Spec& x, c10::ArrayRef<Spec> extra) const;
  int64_t output_width() const { return config_.heads().heads * config_.heads().head_dim; }
  /// Views [batch, s, …] of the heads of an activation of the sizes of x.
  kernels::Qkv qkv_views(const at::Tensor& x) const;

  Options options_;
  AttentionConfig config_;
};

}  // namespace weft::ops
