#pragma once
#include "weft/kernels/rotary.h"
#include "weft/ops/operation.h"
#include "weft/ops/qkv.h"

namespace weft::ops {

/// Rotary position embedding of the query and key heads of x: the pair (a, b) of a head becomes
///   (a·cos φ - b·sin φ, b·cos φ + a·sin φ),  φ = position·rotary_base^(-2i/rotary_dim) for pair i.
/// Positions count from 0 in each sequence. Without rotary_base, cos φ and sin φ are extra inputs. dx is the rotation
/// of dy by -φ.
class RotaryEmbedding final : public Op<RotaryEmbedding> {
 public:
  struct Options {
    int64_t num_attention_heads = 0;
    int64_t kv_channels = 0;
    std::optional<int64_t> num_gqa_groups = {};
    std::optional<QkvLayout> qkv_layout = {};
    std::optional<int64_t> rotary_dim = {};
    bool interleaved = false;
    std::optional<double> rotary_base = 10000.0;
    std::optional<QkvFormat> qkv_format = {};
    static constexpr auto fields() {
      return std::tuple{
          Field{"num_attention_heads", &Options::num_attention_heads, description::kNumAttentionHeads,
                ParamKind::required},
          Field{"kv_channels", &Options::kv_channels, description::kKvChannels, ParamKind::required},
          Field{"num_gqa_groups", &Options::num_gqa_groups, description::kNumGqaGroups},
          Field{"qkv_layout", &Options::qkv_layout,
                "Order of the heads: ``\"group_interleaved\"`` for each group its query heads, key and value; "
                "``\"concatenated\"`` all queries, keys, values; None means query heads only, all of which are "
                "rotated."},
          Field{"rotary_dim", &Options::rotary_dim,
                "Number of channels of a head that are rotated, the first ones; None means all."},
          Field{"interleaved", &Options::interleaved,
                "Rotate neighbouring channels (2i, 2i+1); False rotates channels (i, i + rotary_dim/2)."},
          Field{"rotary_base", &Options::rotary_base,
                "Base of the angles position·rotary_base^(-2i/rotary_dim); None takes cos and sin of the angles as "
                "extra inputs."},
          Field{"qkv_format", &Options::qkv_format, description::kQkvFormat}};
    }
  };
  enum Saved { kCos, kSin, kOffsets, kInput };

  explicit RotaryEmbedding(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "RotaryEmbedding"; }
  int extra_inputs() const override { return (takes_tables() ? 2 : 0) + (packed() ? 1 : 0); }
  bool is_index(int extra) const override { return packed() && extra == offsets_index(); }
  std::vector<std::string> saved_names() const override { return {"cos", "sin", "cu_seqlens", "input"}; }
  DtypeRule dtype_rule() const override { return DtypeRule::input; }
  kernels::TierChoice kernel(const TierQuery& q) const override {
    return kernels::choose_vector_tier(q.device, q.dtype);
  }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  bool packed() const { return options_.qkv_format == QkvFormat::thd; }
  bool takes_tables() const { return !options_.rotary_base; }
  /// Extra inputs are cos and sin, if they are taken, then cu_seqlens.
  int offsets_index() const { return takes_tables() ? 2 : 0; }
  bool needs_table_grads(const OpPlan& plan) const {
    return takes_tables() && (plan.needs_extra_grad[0] || plan.needs_extra_grad[1]);
  }
  void check(const Spec& x, c10::ArrayRef<Spec> extra) const;
  at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& cu_seqlens,
                    kernels::RotaryDirection direction) const;
  void differentiate_tables(OpContext& ctx, const at::Tensor& dy) const;

  Options options_;
  kernels::RotaryHeads heads_;
};

}  // namespace weft::ops
