#include "weft/kernels/scored_attention.h"

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "weft/kernels/opmath.h"
#include "weft/kernels/sequence_offsets.h"

// One key head of one sequence at a time, with the query heads that share it: r·Tq queries.

namespace weft::kernels {
namespace {

constexpr double kMaskedScore = -std::numeric_limits<double>::infinity();

/// The part of a call for sequence `batch` (of a batch, or a packed one) and the key head `group`.
struct ScorePart {
  const Attention& attention;
  const ScoreTerms& terms;
  int64_t batch, group, heads;  // `heads` query heads share the key head
  int64_t queries, keys;

  at::Tensor select_heads(const at::Tensor& per_head) const { return per_head.narrow(0, group * heads, heads); }

  /// A slice of a tensor that broadcasts to [batch, heads, Tq, Tk], which broadcasts to [r, Tq, Tk].
  at::Tensor select_bias(const at::Tensor& bias) const {
    const auto entry = bias.select(0, bias.size(0) == 1 ? 0 : batch);
    return entry.size(0) == 1 ? entry : select_heads(entry);
  }

  at::Tensor distances(const at::Tensor& like) const {
    const auto options = like.options().dtype(at::kLong);
    const auto shift = attention.bottom_right ? keys - queries : 0;
    return at::arange(keys, options).unsqueeze(0) - at::arange(queries, options).unsqueeze(1) - shift;
  }

  /// [r, Tq, Tk] of q [r·Tq, D] and k [Tk, D]: -inf for keys that are not seen.
  at::Tensor scores(const at::Tensor& q, const at::Tensor& k) const {
    auto result = at::mm(q, k.t()).mul_(attention.scale).view({heads, queries, keys});
    if (terms.bias.defined()) result.add_(to_opmath(select_bias(terms.bias)));
    if (attention.sees_all() && !terms.slopes.defined()) return result;
    const auto distance = distances(result);
    if (terms.slopes.defined()) result.sub_(select_heads(terms.slopes).view({-1, 1, 1}) * distance.abs());
    if (attention.right >= 0) result.masked_fill_(distance > attention.right, kMaskedScore);
    if (attention.left >= 0) result.masked_fill_(distance < -attention.left, kMaskedScore);
    return result;
  }
};

/// exp(scores - logsumexp), 0 in rows that see no key.
at::Tensor probabilities(const at::Tensor& scores, const at::Tensor& logsumexp) {
  const auto finite = logsumexp.masked_fill(logsumexp == kMaskedScore, 0);
  return (scores - finite.unsqueeze(-1)).exp_();
}

/// [Tq, r, D] of one sequence and group as [r·Tq, D] in opmath, and back.
at::Tensor query_matrix(const at::Tensor& t) {
  return to_opmath(t).transpose(0, 1).reshape({t.size(0) * t.size(1), t.size(2)});
}
void store_queries(const at::Tensor& matrix, const at::Tensor& t) {
  t.copy_(matrix.view({t.size(1), t.size(0), t.size(2)}).transpose(0, 1));
}

/// Calls run(part, query, key): the tokens of the part begin at the rows `query` and `key` of entry `part.batch`, or of
/// entry 0 of packed sequences.
template <class Run>
void for_each_score_part(const Attention& attention, const ScoreTerms& terms, const Qkv& in, const Run& run) {
  const auto groups = in.q.size(2), heads = in.q.size(3);
  const auto compute_groups = [&](int64_t batch, int64_t query, int64_t queries, int64_t key, int64_t keys) {
    if (queries == 0) return;
    for (int64_t g = 0; g < groups; ++g) run(ScorePart{attention, terms, batch, g, heads, queries, keys}, query, key);
  };
  if (!attention.cu_seqlens_q.defined()) {
    for (int64_t b = 0; b < in.q.size(0); ++b) compute_groups(b, 0, in.q.size(1), 0, in.k.size(1));
    return;
  }
  const SequenceOffsets queries(attention.cu_seqlens_q, in.q.size(1), "cu_seqlens_q");
  const SequenceOffsets keys(attention.cu_seqlens_kv, in.k.size(1), "cu_seqlens_kv");
  TORCH_CHECK_VALUE(queries.sequences() == keys.sequences(), "cu_seqlens_q has ", queries.sequences(),
                    " sequences, cu_seqlens_kv ", keys.sequences(), "; expected the same number.");
  for (int64_t i = 0; i < queries.sequences(); ++i)
    compute_groups(i, queries.begin(i), queries.rows(i), keys.begin(i), keys.rows(i));
}

/// Of [batch, T, groups, ..] the rows of one part.
at::Tensor part_of(const ScorePart& part, const at::Tensor& t, int64_t begin, int64_t rows) {
  const auto entry = part.attention.cu_seqlens_q.defined() ? 0 : part.batch;
  return t.select(0, entry).narrow(0, begin, rows).select(1, part.group);
}
/// Of [batch, heads, Tq] those of one part, [r, Tq].
at::Tensor statistics_of(const ScorePart& part, const at::Tensor& t, int64_t query) {
  const auto entry = part.attention.cu_seqlens_q.defined() ? 0 : part.batch;
  return part.select_heads(t.select(0, entry)).narrow(1, query, part.queries);
}

void check_terms(const Attention& attention, const ScoreTerms& terms, const Qkv& in) {
  const auto heads = in.q.size(2) * in.q.size(3);
  TORCH_CHECK_VALUE(attention.dropout == 0, "attention: dropout with a bias, a sink or the largest score is not ",
                    "supported.");
  for (const auto* t : {&terms.slopes, &terms.sink})
    TORCH_CHECK_VALUE(!t->defined() || (t->dim() == 1 && t->size(0) == heads),
                      "attention: ALiBi slopes or a sink have ", "shape ", t->sizes(), ", expected [", heads, "].");
  if (!terms.bias.defined()) return;
  const std::vector<int64_t> all{in.q.size(0), heads, in.q.size(1), in.k.size(1)};
  const bool fits =
      !attention.cu_seqlens_q.defined() && terms.bias.dim() == 4 && at::is_expandable_to(terms.bias.sizes(), all);
  TORCH_CHECK_VALUE(fits, "attention: the bias has shape ", terms.bias.sizes(), ", expected one that broadcasts to ",
                    all, ", and no packed sequences.");
}

}  // namespace

ScoreStatistics scored_attention_forward(const Attention& attention, const ScoreTerms& terms, const Qkv& in,
                                         const at::Tensor& out) {
  check_terms(attention, terms, in);
  const auto options = in.q.options().dtype(at::toOpMathType(in.q.scalar_type()));
  const auto empty = [&] { return at::empty({in.q.size(0), in.q.size(2) * in.q.size(3), in.q.size(1)}, options); };
  const ScoreStatistics statistics{empty(), empty()};
  for_each_score_part(attention, terms, in, [&](const ScorePart& part, int64_t query, int64_t key) {
    const auto logsumexp = statistics_of(part, statistics.logsumexp, query);
    const auto largest = statistics_of(part, statistics.largest, query);
    const auto result = part_of(part, out, query, part.queries);
    if (part.keys == 0) {
      largest.fill_(kMaskedScore), logsumexp.fill_(kMaskedScore), result.zero_();
      return;
    }
    const auto k = to_opmath(part_of(part, in.k, key, part.keys)), v = to_opmath(part_of(part, in.v, key, part.keys));
    const auto scores = part.scores(query_matrix(part_of(part, in.q, query, part.queries)), k);
    largest.copy_(scores.amax(-1));
    logsumexp.copy_(at::logsumexp(scores, {-1}));
    if (terms.sink.defined())
      logsumexp.copy_(at::logaddexp(logsumexp, to_opmath(part.select_heads(terms.sink)).unsqueeze(-1)));
    store_queries(at::mm(probabilities(scores, logsumexp).view({-1, part.keys}), v), result);
  });
  return statistics;
}

ScoreTerms scored_attention_backward(const Attention& attention, const ScoreTerms& terms, const Qkv& in,
                                     const at::Tensor& logsumexp, const at::Tensor& dout, const Qkv& grads) {
  check_terms(attention, terms, in);
  const auto zeros = [](const at::Tensor& t) {
    return t.defined() ? at::zeros_like(t, t.options().dtype(at::toOpMathType(t.scalar_type()))) : at::Tensor();
  };
  ScoreTerms sums{.bias = zeros(terms.bias), .slopes = {}, .sink = zeros(terms.sink)};
  for (const auto* t : {&grads.q, &grads.k, &grads.v}) t->zero_();
  for_each_score_part(attention, terms, in, [&](const ScorePart& part, int64_t query, int64_t key) {
    if (part.keys == 0) return;
    const auto q = query_matrix(part_of(part, in.q, query, part.queries));
    const auto k = to_opmath(part_of(part, in.k, key, part.keys)), v = to_opmath(part_of(part, in.v, key, part.keys));
    const auto g = query_matrix(part_of(part, dout, query, part.queries));
    const auto row_sums = statistics_of(part, logsumexp, query);
    const auto p = probabilities(part.scores(q, k), row_sums);
    const auto dp = at::mm(g, v.t()).view(p.sizes());
    const auto delta = (p * dp).sum(-1);
    const auto ds = (dp - delta.unsqueeze(-1)).mul_(p);
    if (terms.sink.defined()) {
      const auto sink = to_opmath(part.select_heads(terms.sink)).unsqueeze(-1);
      part.select_heads(sums.sink).sub_((sink - row_sums).exp_().mul_(delta).sum(-1));
    }
    if (terms.bias.defined()) {
      const auto sum = part.select_bias(sums.bias);
      sum.add_(at::sum_to(ds, sum.sizes()));
    }
    const auto rows = ds.view({-1, part.keys});
    store_queries(at::mm(rows, k).mul_(attention.scale), part_of(part, grads.q, query, part.queries));
    part_of(part, grads.k, key, part.keys).copy_(at::mm(rows.t(), q).mul_(attention.scale));
    part_of(part, grads.v, key, part.keys).copy_(at::mm(p.view({-1, part.keys}).t(), g));
  });
  return sums;
}

}  // namespace weft::kernels
