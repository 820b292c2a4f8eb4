#pragma once
#include <string>

#include "weft/te/dtype.h"
#include "weft/te/enums.h"

namespace weft::te {

/// What Transformer Engine knows about an attention when it asks for a backend.
struct AttentionQuery {
  DType q_dtype, kv_dtype;
  QkvLayout layout;
  BiasType bias;
  MaskType mask;
  SoftmaxType softmax;
  double dropout;
  int64_t heads, groups, max_seqlen_q, max_seqlen_kv;
  bool is_training, return_max_logit;
};

/// Why `fused_attn_fwd` and `fused_attn_bwd` do not compute it; empty if they do.
std::string fused_attention_rejection(const AttentionQuery& query);

}  // namespace weft::te
