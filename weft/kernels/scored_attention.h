#pragma once
#include "weft/kernels/attention.h"

namespace weft::kernels {

/// What the scores of softmax attention may have in addition. Undefined tensors are absent.
struct ScoreTerms {
  at::Tensor bias;    // is added to scaled scores; broadcasts to [batch, heads, Tq, Tk]; not for packed sequences
  at::Tensor slopes;  // ALiBi, [heads]: -slope·|d| is added, with the distance d of `Attention`
  at::Tensor sink;    // [heads]: the score of each query for one more key, whose value is 0

  bool any() const { return bias.defined() || slopes.defined() || sink.defined(); }
};

/// log Σ exp and the largest of the scores of each query, [batch, heads, Tq] in float32 or float64. The sink counts in
/// the first only.
struct ScoreStatistics {
  at::Tensor logsumexp, largest;
};

/// `attention_forward` with score terms, by ATen, without dropout. Values may have other channels than keys.
ScoreStatistics scored_attention_forward(const Attention& attention, const ScoreTerms& terms, const Qkv& in,
                                         const at::Tensor& out);

/// Gradients with the sizes of the terms, in float32 or float64; of the bias and the sink only.
/// Fills `grads` as `attention_backward` does.
ScoreTerms scored_attention_backward(const Attention& attention, const ScoreTerms& terms, const Qkv& in,
                                     const at::Tensor& logsumexp, const at::Tensor& dout, const Qkv& grads);

}  // namespace weft::kernels
