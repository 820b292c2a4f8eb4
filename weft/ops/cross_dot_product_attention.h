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
    QkvFormat qkv_format = QkvFormat::sbhd;
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
  int extra_inputs() const override { return packed() ? 4 : 2; }
  bool is_index(int extra) const override { return extra >= kCuSeqlensQ; }
  bool depends_on_training() const override { return options_.attention_dropout > 0; }
  std::vector<std::string> saved_names() const override {
    return {"query", "key", "value", "output", "logsumexp", "cu_seqlens_q", "cu_seqlens_kv", "seed"};
  }
  DtypeRule dtype_rule() const override { return DtypeRule::autocast; }
  kernels::TierChoice kernel(const TierQuery& q) const override;
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra, c10::ArrayRef<Spec>) const override;
  Flops flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  bool packed() const { return options_.qkv_format == QkvFormat::thd; }
  bool drops(const OpPlan& plan) const { return plan.training && options_.attention_dropout > 0; }
  AttentionOptions attention_options() const {
    return {options_.attn_mask_type, options_.window_size, options_.softmax_scale, options_.attention_dropout};
  }
  void check(const Spec& x, c10::ArrayRef<Spec> extra) const;
  /// The problem of one call; offsets and seed may be undefined.
  kernels::Attention problem(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_kv,
                             const at::Tensor& seed) const;
  /// Views [batch, s, …] of the query heads of an activation, and of queries, keys and values.
  at::Tensor query_views(const at::Tensor& q) const;
  kernels::Qkv qkv_views(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;

  Options options_;
  QkvHeads heads_;
};

}  // namespace weft::ops
