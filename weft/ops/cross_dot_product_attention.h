#pragma once
#include "weft/ops/attention.h"
#include "weft/ops/operation.h"

namespace weft::ops {

/// Softmax attention of the query heads x to the keys and values of two extra inputs, which may have another length:
///   y = softmax(softmax_scale·q kᵀ + mask) v.
/// Saves the three inputs, y and the logsumexp of the scores.
class CrossDotProductAttention final : public Op<CrossDotProductAttention> {
 public:
  struct Options {
    int64_t num_attention_heads = 0;
    int64_t kv_channels = 0;
    std::optional<int64_t> num_gqa_groups = {};
    AttnMaskType attn_mask_type = AttnMaskType::no_mask;
    std::optional<std::vector<int64_t>> window_size = {};
    std::optional<double> softmax_scale = {};
    double attention_dropout = 0;
    std::optional<QkvFormat> qkv_format = {};
    static constexpr auto fields() {
      return std::tuple{Field{"num_attention_heads", &Options::num_attention_heads, description::kNumAttentionHeads,
                              ParamKind::required},
                        Field{"kv_channels", &Options::kv_channels, description::kKvChannels, ParamKind::required},
                        Field{"num_gqa_groups", &Options::num_gqa_groups, description::kNumGqaGroups},
                        Field{"attn_mask_type", &Options::attn_mask_type, description::kAttnMaskType},
                        Field{"window_size", &Options::window_size, description::kWindowSize},
                        Field{"softmax_scale", &Options::softmax_scale, description::kSoftmaxScale},
                        Field{"attention_dropout", &Options::attention_dropout, description::kAttentionDropout},
                        Field{"qkv_format", &Options::qkv_format, description::kQkvFormat}};
    }
  };
  enum Saved { kSavedQuery, kSavedKey, kSavedValue, kOutput, kLogsumexp, kQueryOffsets, kKeyOffsets, kSeed };
  enum Extra { kKey, kValue, kCuSeqlensQ, kCuSeqlensKv };

  explicit CrossDotProductAttention(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "CrossDotProductAttention"; }
  int extra_inputs() const override { return config_.packed() ? 4 : 2; }
  bool is_index(int extra) const override { return extra >= kCuSeqlensQ; }
  bool depends_on_training() const override { return config_.drops_in_training(); }
  std::vector<std::string> saved_names() const override {
    return {"query", "key", "value", "output", "logsumexp", "cu_seqlens_q", "cu_seqlens_kv", "seed"};
  }
  DtypeRule dtype_rule() const override { return DtypeRule::autocast; }
  /// For queries and keys of unequal lengths.
  kernels::TierChoice kernel(const TierQuery& q) const override { return config_.tier(q, /*equal_lengths=*/false); }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra, c10::ArrayRef<Spec>) const override;
  Flops flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  void check(const Spec& x, c10::ArrayRef<Spec> extra) const;
  /// Views [batch, s, …] of the heads of queries, keys and values.
  kernels::Qkv qkv_views(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;

  Options options_;
  AttentionConfig config_;
};

}  // namespace weft::ops
