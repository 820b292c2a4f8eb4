#include "weft/te/attention_backend.h"

#include "weft/te/fused_attention.h"

namespace weft::te {
namespace {

bool is_half_or_float(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32;
}
bool ends_at_last_key(MaskType mask) {
  return mask == MaskType::causal_bottom_right || mask == MaskType::padding_causal_bottom_right;
}

}  // namespace

std::string fused_attention_rejection(const AttentionQuery& q) {
  const bool dense_mask =
      q.mask == MaskType::none || q.mask == MaskType::causal || q.mask == MaskType::causal_bottom_right;
  if (q.layout == QkvLayout::not_set) return "the layout of queries, keys and values is not set.";
  const auto parts = layout_parts(q.layout);
  if (q.q_dtype != q.kv_dtype || !is_half_or_float(q.q_dtype))
    return "FP8 attention is not supported on the CPU; expected float16, bfloat16 or float32.";
  if (q.groups <= 0 || q.heads % q.groups != 0) return "the number of heads is not a multiple of the number of groups.";
  if (parts.paged && q.is_training) return "a cache of pages has no backward.";
  if (ends_at_last_key(q.mask) && q.max_seqlen_q > q.max_seqlen_kv)
    return "a causal mask that is aligned at the last key requires at least as many keys as queries.";
  if (q.bias == BiasType::pre_scale) return "pre_scale_bias is not supported.";
  if (q.bias == BiasType::alibi && (q.mask == MaskType::none || !dense_mask))
    return "ALiBi requires a causal mask without padding.";
  if (q.bias == BiasType::post_scale && !dense_mask) return "a bias with padding is not supported.";
  const bool scored = q.bias != BiasType::none || q.softmax != SoftmaxType::vanilla || q.return_max_logit;
  if (scored && q.dropout > 0) return "dropout with a bias, a softmax offset or return_max_logit is not supported.";
  return "";
}

}  // namespace weft::te
