#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "weft/kernels/scored_attention.h"
#include "weft/te/enums.h"
#include "weft/te/token_rows.h"

// Attention of Transformer Engine's layouts and masks by weft's kernels. All tensors are on the CPU.

namespace weft::te {

/// The formats of queries and of keys and values, and how their gradients share memory.
struct LayoutParts {
  enum class Interleaved { none, qkv_before_heads, qkv_after_heads, kv_before_heads, kv_after_heads };

  QkvFormat queries, keys;
  Interleaved interleaved = Interleaved::none;
  bool paged = false;
};
LayoutParts layout_parts(QkvLayout layout);

/// The sizes of a tensor of one of the formats; of `thd` batch is 1 and length the number of tokens.
struct Extents {
  int64_t batch, length, heads, channels;

  static Extents of(const at::Tensor& t, QkvFormat format);
  std::vector<int64_t> sizes(QkvFormat format) const;
};

/// The arguments that both passes have.
struct FusedAttention {
  double scale = 1, dropout = 0;
  QkvLayout layout = QkvLayout::not_set;
  BiasType bias_type = BiasType::none;
  MaskType mask = MaskType::none;
  SoftmaxType softmax = SoftmaxType::vanilla;
  int64_t left = -1, right = -1;
  bool bottom_right = false;
  at::Tensor cu_seqlens_q, cu_seqlens_kv;                // of valid tokens
  at::Tensor cu_seqlens_q_padded, cu_seqlens_kv_padded;  // where sequences start in thd; undefined: without padding
  at::Tensor page_table_k = {}, page_table_v = {};
  at::Tensor bias, sink;  // as given, undefined if absent
  at::Tensor seed;        // int64, one element, with dropout
};

/// What forward computes in addition to the output: [b, h, s, 1], or [t, h, 1] for queries of `thd`, in float32.
struct FusedStatistics {
  at::Tensor logsumexp;
  at::Tensor largest;  // of the scores, if wanted; -inf for padding
};

/// Fills `out`, in `out_format`. Padding becomes 0.
FusedStatistics fused_attention_forward(const FusedAttention& attention, const kernels::Qkv& in, const at::Tensor& out,
                                        QkvFormat out_format, bool want_largest);

/// The tensors that backward reads: the output of forward and its gradient, and logsumexp.
struct FusedSaved {
  at::Tensor out, dout, logsumexp;
  QkvFormat out_format, dout_format;
};

/// Gradients of the bias and the softmax offset, with their sizes; undefined if absent.
struct FusedTermGradients {
  at::Tensor bias, sink;
};

/// Fills `grads`, in the formats of `grad_layout`.
FusedTermGradients fused_attention_backward(const FusedAttention& attention, const kernels::Qkv& in,
                                            const FusedSaved& saved, const kernels::Qkv& grads, QkvLayout grad_layout);

}  // namespace weft::te
