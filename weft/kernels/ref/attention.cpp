#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "weft/kernels/attention_tiers.h"
#include "weft/kernels/opmath.h"

namespace weft::kernels::ref {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
constexpr int64_t kMaxScores = 1 << 20;  // in a block

/// The keys that any of the queries [begin, end) sees: a range, possibly empty.
std::pair<int64_t, int64_t> visible_keys(const DenseAttention& d, int64_t begin, int64_t end) {
  const auto& a = d.attention;
  const auto first = d.first_distance();
  const auto low = a.left < 0 ? 0 : std::clamp<int64_t>(begin - first - a.left, 0, d.keys());
  const auto high = a.right < 0 ? d.keys() : std::clamp<int64_t>(end - first + a.right, low, d.keys());
  return {low, high};
}

/// Calls run(block) for blocks of at most kMaxScores scores, or of one query of one sequence. Their keys are those that
/// the queries see.
template <class Run>
void for_each_block(const DenseAttention& d, const Run& run) {
  const auto per_query = d.heads() * d.keys();
  const auto batches = std::clamp<int64_t>(kMaxScores / (per_query * d.queries()), 1, d.batch());
  const auto queries = std::clamp<int64_t>(kMaxScores / (per_query * batches), 1, d.queries());
  for (int64_t b = 0; b < d.batch(); b += batches)
    for (int64_t i = 0; i < d.queries(); i += queries) {
      const auto rows = std::min(queries, d.queries() - i);
      const auto [low, high] = visible_keys(d, i, i + rows);
      run(ScoreBlock{b, std::min(batches, d.batch() - b), i, rows, low, high - low});
    }
}

/// The queries of a block, a view [batches, groups, heads, rows, D] of [batch, T, groups, heads, D].
at::Tensor query_block(const at::Tensor& t, const ScoreBlock& s) {
  return t.narrow(0, s.batch, s.batches).narrow(1, s.query, s.queries).permute({0, 2, 3, 1, 4});
}
/// The keys of a block, a view [batches, groups, rows, D] of [batch, T, groups, D].
at::Tensor key_block(const at::Tensor& t, const ScoreBlock& s) {
  return t.narrow(0, s.batch, s.batches).narrow(1, s.key, s.keys).permute({0, 2, 1, 3});
}
/// The same in opmath, as [batches·groups, heads·rows, D] and [batches·groups, rows, D].
at::Tensor query_rows(const at::Tensor& t, const ScoreBlock& s) {
  return to_opmath(query_block(t, s)).reshape({s.batches * t.size(2), t.size(3) * s.queries, t.size(4)});
}
at::Tensor key_rows(const at::Tensor& t, const ScoreBlock& s) {
  return to_opmath(key_block(t, s)).reshape({s.batches * t.size(2), s.keys, t.size(3)});
}

/// Scaled scores of a block with -inf for keys that are not seen, [batches·groups, heads·queries, keys].
at::Tensor scores(const DenseAttention& d, const ScoreBlock& s, const at::Tensor& q, const at::Tensor& k) {
  auto result = at::bmm(q, k.transpose(1, 2)).mul_(d.attention.scale);
  const auto& a = d.attention;
  if (a.sees_all()) return result;
  const auto options = result.options().dtype(at::kLong);
  const auto distance = at::arange(s.key, s.key + s.keys, options).unsqueeze(0) -
                        at::arange(s.query, s.query + s.queries, options).unsqueeze(1) + d.first_distance();
  auto hidden = at::zeros_like(distance, at::kBool);
  if (a.right >= 0) hidden.logical_or_(distance > a.right);
  if (a.left >= 0) hidden.logical_or_(distance < -a.left);
  result.view({-1, s.queries, s.keys}).masked_fill_(hidden, kMinusInf);
  return result;
}

/// `t` with -inf replaced by 0, so that exp(-inf - t) is 0 for a query that sees no key.
at::Tensor finite(const at::Tensor& t) { return t.masked_fill(t == kMinusInf, 0); }

/// The view of logsumexp of a block, [batches, groups, heads, queries].
at::Tensor statistics(const DenseAttention& d, const ScoreBlock& s) {
  return d.logsumexp.narrow(0, s.batch, s.batches)
      .narrow(2, s.query, s.queries)
      .unflatten(1, {d.in.q.size(2), d.heads_per_group()});
}

at::Tensor factors_like(const DenseAttention& d, const ScoreBlock& s, const at::Tensor& probabilities) {
  return dropout_factors(d, s, probabilities.scalar_type()).to(probabilities.device()).view(probabilities.sizes());
}

void forward_block(const DenseAttention& d, const ScoreBlock& s) {
  const auto out = query_block(d.out, s), logsumexp = statistics(d, s);
  if (s.keys == 0) {
    out.zero_();
    logsumexp.fill_(kMinusInf);
    return;
  }
  auto p = scores(d, s, query_rows(d.in.q, s), key_rows(d.in.k, s));
  const auto largest = finite(p.amax(-1, /*keepdim=*/true));
  p.sub_(largest).exp_();
  const auto sum = p.sum(-1, /*keepdim=*/true);
  logsumexp.copy_((sum.log() + largest).view(logsumexp.sizes()));
  if (d.attention.dropout > 0) p.mul_(factors_like(d, s, p));
  const auto divisor = sum.masked_fill(sum == 0, 1);
  out.copy_(at::bmm(p, key_rows(d.in.v, s)).div_(divisor).view(out.sizes()));
}

/// Gradients of keys and values in opmath, [batch, T, groups, D].
struct KeyGradients {
  at::Tensor dk, dv;
};

void backward_block(const DenseAttention& d, const ScoreBlock& s, const at::Tensor& dout, const at::Tensor& dq,
                    const KeyGradients& sums) {
  const auto dq_block = query_block(dq, s);
  if (s.keys == 0) {
    dq_block.zero_();
    return;
  }
  const auto q = query_rows(d.in.q, s), k = key_rows(d.in.k, s), v = key_rows(d.in.v, s), g = query_rows(dout, s);
  auto p = scores(d, s, q, k);
  p.sub_(finite(statistics(d, s)).reshape({p.size(0), p.size(1), 1})).exp_();
  auto dp = at::bmm(g, v.transpose(1, 2));
  auto dropped = p;
  if (d.attention.dropout > 0) {
    const auto factors = factors_like(d, s, p);
    dp.mul_(factors);
    dropped = at::mul(p, factors);
  }
  const auto add = [&](const at::Tensor& sum, const at::Tensor& rows) {
    const auto block = key_block(sum, s);
    block.add_(rows.view(block.sizes()));
  };
  add(sums.dv, at::bmm(dropped.transpose(1, 2), g));
  // δ = Σ p·dp equals Σ dout·out, without the rounding of out.
  const auto ds = dp.sub_(at::mul(p, dp).sum(-1, /*keepdim=*/true)).mul_(p).mul_(d.attention.scale);
  dq_block.copy_(at::bmm(ds, k).view(dq_block.sizes()));
  add(sums.dk, at::bmm(ds.transpose(1, 2), q));
}

}  // namespace

void attention_forward(const DenseAttention& d) {
  for_each_block(d, [&](const ScoreBlock& s) { forward_block(d, s); });
}

void attention_backward(const DenseAttention& d, const at::Tensor& dout, const Qkv& grads) {
  const auto zeros = [](const at::Tensor& t) {
    return at::zeros_like(t, t.options().dtype(at::toOpMathType(t.scalar_type())), at::MemoryFormat::Contiguous);
  };
  const KeyGradients sums{zeros(d.in.k), zeros(d.in.v)};
  for_each_block(d, [&](const ScoreBlock& s) { backward_block(d, s, dout, grads.q, sums); });
  grads.k.copy_(sums.dk);
  grads.v.copy_(sums.dv);
}

}  // namespace weft::kernels::ref
