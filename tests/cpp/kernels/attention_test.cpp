// Attention against scores in float64: both tiers, masks of unequal lengths, offsets, queries that see no key.
#include "weft/kernels/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/cpp/kernels/threads.h"
#include "weft/kernels/attention_tiers.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

using at::Tensor;

constexpr int64_t kGroups = 2, kPerGroup = 2, kHeadDim = 4;

Attention small_attention() { return {.scale = 0.6}; }

Qkv random_heads(int64_t batch, int64_t queries, int64_t keys) {
  return {at::randn({batch, queries, kGroups, kPerGroup, kHeadDim}, at::kDouble),
          at::randn({batch, keys, kGroups, kHeadDim}, at::kDouble),
          at::randn({batch, keys, kGroups, kHeadDim}, at::kDouble)};
}

/// Scaled scores [batch, groups, heads per group, Tq, Tk] with -inf where a query does not see a key.
Tensor expected_scores(const Attention& a, const Qkv& in) {
  const auto tq = in.q.size(1), tk = in.k.size(1);
  const auto k = in.k.permute({0, 2, 3, 1}).unsqueeze(2);
  const auto scores = in.q.permute({0, 2, 3, 1, 4}).matmul(k) * a.scale;
  const auto shift = a.bottom_right ? tk - tq : 0;
  const auto distance =
      (at::arange(tk) + a.key_offset).unsqueeze(0) - (at::arange(tq) + a.query_offset + shift).unsqueeze(1);
  auto seen = at::ones({tq, tk}, at::kBool);
  if (a.right >= 0) seen = seen.logical_and(distance <= a.right);
  if (a.left >= 0) seen = seen.logical_and(distance >= -a.left);
  return scores.masked_fill(seen.logical_not(), -INFINITY);
}

/// out and logsumexp of `in`.
struct Result {
  Tensor out, logsumexp;
};
Result run(const Attention& a, const Qkv& in) {
  auto out = at::full(in.q.sizes(), NAN, in.q.options());
  auto logsumexp = attention_forward(a, in, out);
  return {out, logsumexp};
}

Qkv gradients(const Attention& a, const Qkv& in, const Result& r, const Tensor& dout) {
  const auto nan_like = [](const Tensor& t) { return at::full(t.sizes(), NAN, t.options()); };
  const Qkv grads{nan_like(in.q), nan_like(in.k), nan_like(in.v)};
  attention_backward(a, in, r.out, r.logsumexp, dout, grads);
  return grads;
}

std::vector<Attention> masks() {
  std::vector<Attention> list;
  for (const int64_t left : {-1, 0, 2})
    for (const int64_t right : {-1, 0, 1})
      for (const bool bottom_right : {false, true}) {
        auto a = small_attention();
        a.left = left, a.right = right, a.bottom_right = bottom_right;
        list.push_back(a);
      }
  return list;
}

TEST(KernelsAttention, MatchesScoresForEveryMaskAndLength) {
  at::manual_seed(1);
  for (const auto& a : masks())
    for (const auto& [tq, tk] : {std::pair<int64_t, int64_t>{1, 1}, {5, 5}, {3, 7}, {7, 3}, {1, 6}, {6, 1}}) {
      const auto in = random_heads(2, tq, tk);
      const auto got = run(a, in);
      const auto scores = expected_scores(a, in);
      const auto p = scores.softmax(-1).nan_to_num(0);
      const auto out = p.matmul(in.v.permute({0, 2, 1, 3}).unsqueeze(2));
      const auto hint = c10::str("left ", a.left, " right ", a.right, " lengths ", tq, " ", tk);
      EXPECT_TRUE(at::allclose(got.out.permute({0, 2, 3, 1, 4}), out, 1e-12, 1e-12)) << hint;
      EXPECT_TRUE(at::allclose(got.logsumexp, scores.logsumexp(-1).flatten(1, 2), 1e-12, 1e-12)) << hint;

      const auto dout = at::randn(in.q.sizes(), at::kDouble), g = dout.permute({0, 2, 3, 1, 4});
      const auto grads = gradients(a, in, got, dout);
      const auto k = in.k.permute({0, 2, 1, 3}).unsqueeze(2), v = in.v.permute({0, 2, 1, 3}).unsqueeze(2);
      const auto dp = g.matmul(v.transpose(-1, -2));
      const auto ds = p * (dp - (p * dp).sum(-1, true)) * a.scale;
      EXPECT_TRUE(at::allclose(grads.q.permute({0, 2, 3, 1, 4}), ds.matmul(k), 1e-10, 1e-11)) << hint;
      const auto dk = ds.transpose(-1, -2).matmul(in.q.permute({0, 2, 3, 1, 4})).sum(2);
      EXPECT_TRUE(at::allclose(grads.k.permute({0, 2, 1, 3}), dk, 1e-10, 1e-11)) << hint;
      EXPECT_TRUE(at::allclose(grads.v.permute({0, 2, 1, 3}), p.transpose(-1, -2).matmul(g).sum(2), 1e-10, 1e-11))
          << hint;
    }
}

TEST(KernelsAttention, ResultsOfAnyStrides) {
  auto a = small_attention();
  a.right = 0;
  const auto in = random_heads(2, 5, 5);
  const auto dense = run(a, in);
  const auto strided = [](const Tensor& t) {
    return at::full_like(t, NAN).transpose(1, 4).contiguous().transpose(1, 4);
  };
  Result other{strided(in.q), {}};
  other.logsumexp = attention_forward(a, in, other.out);
  EXPECT_TRUE(at::allclose(other.out, dense.out) && at::equal(other.logsumexp, dense.logsumexp));
  const auto dout = at::randn(in.q.sizes(), at::kDouble);
  const auto expected = gradients(a, in, dense, dout), got = gradients(a, in, other, strided(dout).copy_(dout));
  EXPECT_TRUE(at::allclose(got.q, expected.q) && at::allclose(got.k, expected.k) && at::allclose(got.v, expected.v));
}

TEST(KernelsAttention, QueryWithoutKeysGivesZeros) {
  auto a = small_attention();
  a.right = 0, a.bottom_right = true;
  const auto in = random_heads(1, 5, 3);  // queries 0 and 1 come before every key
  const auto got = run(a, in);
  EXPECT_TRUE(got.out.narrow(1, 0, 2).eq(0).all().item<bool>());
  EXPECT_TRUE(got.logsumexp.narrow(2, 0, 2).eq(-INFINITY).all().item<bool>());
  EXPECT_FALSE(got.out.narrow(1, 2, 3).eq(0).any().item<bool>());
  const auto grads = gradients(a, in, got, at::ones(in.q.sizes(), at::kDouble));
  EXPECT_TRUE(grads.q.narrow(1, 0, 2).eq(0).all().item<bool>());
  for (const auto& t : {grads.q, grads.k, grads.v}) EXPECT_TRUE(t.isfinite().all().item<bool>());
}

TEST(KernelsAttention, BothTiersAgree) {
  for (const int64_t right : {-1, 0})
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      auto a = small_attention();
      a.right = right;
      auto in = random_heads(3, 33, 33);
      in = {in.q.to(dtype), in.k.to(dtype), in.v.to(dtype)};
      const auto dout = at::randn_like(in.q);
      const auto chosen = run(a, in);
      const Result ref{at::empty_like(in.q), at::empty_like(chosen.logsumexp)};
      const DenseAttention dense{a, 0, in, ref.out, ref.logsumexp};
      ref::attention_forward(dense);
      const Qkv ref_grads{at::empty_like(in.q), at::empty_like(in.k), at::empty_like(in.v)};
      ref::attention_backward(dense, dout, ref_grads);
      const auto grads = gradients(a, in, chosen, dout);
      const double tolerance = dtype == at::kDouble ? 1e-11 : 1e-5;
      const auto close = [&](const Tensor& x, const Tensor& y) { return at::allclose(x, y, tolerance, tolerance); };
      EXPECT_TRUE(close(chosen.out, ref.out) && close(chosen.logsumexp, ref.logsumexp));
      EXPECT_TRUE(close(grads.q, ref_grads.q) && close(grads.k, ref_grads.k) && close(grads.v, ref_grads.v));
    }
}

TEST(KernelsAttention, LastQueriesWithOffsetEqualThoseOfWholeSequence) {
  auto a = small_attention();
  a.right = 0, a.left = 4;
  a.dropout = 0.4, a.seed = at::tensor(int64_t{77});
  const auto in = random_heads(2, 9, 9);
  const auto whole = run(a, in);
  a.query_offset = 6;
  const auto last = run(a, {in.q.narrow(1, 6, 3), in.k, in.v});
  EXPECT_TRUE(at::allclose(last.out, whole.out.narrow(1, 6, 3), 1e-12, 1e-12));
  EXPECT_TRUE(at::allclose(last.logsumexp, whole.logsumexp.narrow(2, 6, 3), 1e-12, 1e-12));
}

TEST(KernelsAttention, PartsOfKeysCombineByLogsumexp) {
  auto a = small_attention();
  a.right = 0;
  const auto in = random_heads(2, 8, 8);
  const auto whole = run(a, in);
  const auto first = run(a, {in.q, in.k.narrow(1, 0, 5), in.v.narrow(1, 0, 5)});
  a.key_offset = 5;
  const auto second = run(a, {in.q, in.k.narrow(1, 5, 3), in.v.narrow(1, 5, 3)});
  const auto logsumexp = at::logaddexp(first.logsumexp, second.logsumexp);
  EXPECT_TRUE(at::allclose(logsumexp, whole.logsumexp, 1e-12, 1e-12));
  const auto weighted = [&](const Result& r) {
    const auto weight = (r.logsumexp - logsumexp).exp().transpose(1, 2).unflatten(2, {kGroups, kPerGroup});
    return r.out * weight.unsqueeze(-1);
  };
  EXPECT_TRUE(at::allclose(weighted(first) + weighted(second), whole.out, 1e-12, 1e-12));
}

TEST(KernelsAttention, PackedSequencesOfUnequalLengths) {
  auto a = small_attention();
  a.right = 0, a.bottom_right = true;
  const auto in = random_heads(1, 7, 9);
  const auto part = [&](int64_t q, int64_t tq, int64_t k, int64_t tk) {
    return run(a, {in.q.narrow(1, q, tq), in.k.narrow(1, k, tk), in.v.narrow(1, k, tk)}).out;
  };
  const auto expected = at::cat({part(0, 2, 0, 5), part(2, 4, 5, 4), at::zeros_like(in.q.narrow(1, 6, 1))}, 1);
  a.cu_seqlens_q = at::tensor({0, 2, 6, 7}, at::kInt), a.cu_seqlens_kv = at::tensor({0, 5, 9, 9}, at::kLong);
  const auto got = run(a, in);
  EXPECT_TRUE(at::allclose(got.out, expected, 1e-12, 1e-12));
  const auto grads = gradients(a, in, got, at::ones(in.q.sizes(), at::kDouble));
  for (const auto& t : {grads.q, grads.k, grads.v}) EXPECT_TRUE(t.isfinite().all().item<bool>());
  a.cu_seqlens_kv = at::tensor({0, 9}, at::kLong);
  EXPECT_THROW(run(a, in), c10::ValueError);
}

/// Views of one packed buffer, [group: query heads, key, value], in bfloat16.
Qkv packed_heads(int64_t batch, int64_t rows, int64_t groups, int64_t per_group, int64_t head_dim) {
  const auto all = at::randn({batch, rows, groups, per_group + 2, head_dim}).to(at::kBFloat16);
  return {all.narrow(3, 0, per_group), all.select(3, per_group), all.select(3, per_group + 1)};
}

/// The error of `got` over its bound, at the worst element.
double worst_ratio(const Tensor& got, const Tensor& expected, const Tensor& bound) {
  return ((got.to(at::kDouble) - expected).abs() / (bound + 1e-30)).max().item<double>();
}

/// Runs both passes in bfloat16. The AMX tier rounds probabilities, their gradients and the results to bfloat16
/// (relative error u), and δ = Σ dout·out is that of the rounded out; all else is float32.
void expect_rounding_errors_only(const Attention& a, const Qkv& in, const std::string& hint) {
  const double u = 0x1p-8, slack = 1.05;
  const auto f64 = [](const Tensor& t) { return t.to(at::kDouble); };
  const Qkv wide{f64(in.q), f64(in.k), f64(in.v)};
  const auto scores = expected_scores(a, wide);
  const auto p = scores.softmax(-1).nan_to_num(0);
  const auto q = wide.q.permute({0, 2, 3, 1, 4});
  const auto k = wide.k.permute({0, 2, 1, 3}).unsqueeze(2), v = wide.v.permute({0, 2, 1, 3}).unsqueeze(2);
  const auto dout = at::randn(in.q.sizes()).to(at::kBFloat16), g = f64(dout).permute({0, 2, 3, 1, 4});

  const auto got = run(a, in);
  const auto grads = gradients(a, in, got, dout);
  const auto out_bound = p.matmul(v.abs()) * (2 * u * slack);
  EXPECT_LE(worst_ratio(got.out.permute({0, 2, 3, 1, 4}), p.matmul(v), out_bound), 1) << "out, " << hint;
  EXPECT_TRUE(at::allclose(f64(got.logsumexp), scores.logsumexp(-1).flatten(1, 2), 1e-5, 1e-5)) << hint;

  const auto dp = g.matmul(v.transpose(-1, -2));
  const auto ds = p * (dp - (p * dp).sum(-1, true)) * a.scale;
  const auto ds_bound = (ds.abs() * (2 * u) + p * (g.abs() * out_bound).sum(-1, true) * a.scale) * slack;
  const auto transposed = [](const Tensor& t) { return t.transpose(-1, -2); };
  EXPECT_LE(worst_ratio(grads.q.permute({0, 2, 3, 1, 4}), ds.matmul(k), ds_bound.matmul(k.abs())), 1) << "dq, " << hint;
  EXPECT_LE(worst_ratio(grads.k.permute({0, 2, 1, 3}), transposed(ds).matmul(q).sum(2),
                        transposed(ds_bound).matmul(q.abs()).sum(2)),
            1)
      << "dk, " << hint;
  EXPECT_LE(worst_ratio(grads.v.permute({0, 2, 1, 3}), transposed(p).matmul(g).sum(2),
                        transposed(p).matmul(g.abs()).sum(2) * (2 * u * slack)),
            1)
      << "dv, " << hint;
}

TEST(KernelsAttention, AmxHasOnlyRoundingErrorsForEveryMaskAndLength) {
  if (machine_tier() != Tier::amx) GTEST_SKIP() << "this CPU has no amx";
  at::manual_seed(2);
  for (const auto& a : masks())
    for (const auto& [tq, tk] :
         {std::pair<int64_t, int64_t>{1, 1}, {33, 33}, {31, 70}, {70, 31}, {1, 65}, {65, 1}, {64, 64}}) {
      auto in = packed_heads(2, std::max(tq, tk), kGroups, kPerGroup, 32);
      in = {in.q.narrow(1, 0, tq), in.k.narrow(1, 0, tk), in.v.narrow(1, 0, tk)};
      expect_rounding_errors_only(a, in, c10::str("left ", a.left, " right ", a.right, " lengths ", tq, " ", tk));
    }
}

TEST(KernelsAttention, AmxHasOnlyRoundingErrorsForEveryHeadDim) {
  if (machine_tier() != Tier::amx) GTEST_SKIP() << "this CPU has no amx";
  at::manual_seed(3);
  auto a = small_attention();
  a.right = 0;
  for (const int64_t head_dim : {8, 40, 64, 80, 96, 128, 160, 256}) {
    a.scale = 1 / std::sqrt(static_cast<double>(head_dim));
    expect_rounding_errors_only(a, packed_heads(1, 75, 1, 3, head_dim), c10::str("head_dim ", head_dim));
  }
}

TEST(KernelsAttention, AmxHasOnlyRoundingErrorsForLongSequences) {
  if (machine_tier() != Tier::amx) GTEST_SKIP() << "this CPU has no amx";
  at::manual_seed(4);
  for (const auto& [left, right] : {std::pair<int64_t, int64_t>{-1, 0}, {-1, -1}, {40, 0}, {150, 90}, {300, -1}}) {
    auto a = small_attention();
    a.scale = 0.125, a.left = left, a.right = right;
    for (const int count : {1, 3, 16}) {
      const Threads threads(count);
      expect_rounding_errors_only(a, packed_heads(count == 1 ? 1 : 2, 420, 2, 2, 64),
                                  c10::str("left ", left, " right ", right, " threads ", count));
    }
  }
}

TEST(KernelsAttention, Bfloat16WithLargeScores) {
  at::manual_seed(5);
  auto a = small_attention();
  a.right = 0;
  auto in = packed_heads(1, 40, 1, 1, 32);
  in.q.mul_(1e16), in.k.mul_(1e16);
  const auto got = run(a, in);
  const auto& out = got.out;  // each probability is 0 or 1
  const auto scores = expected_scores(a, {in.q.to(at::kDouble), in.k.to(at::kDouble), in.v.to(at::kDouble)});
  EXPECT_TRUE(at::equal(out.select(2, 0).select(2, 0),
                        in.v.select(2, 0).index_select(1, scores.flatten(0, 2).squeeze(0).argmax(-1).flatten())));
  const auto grads = gradients(a, in, got, at::ones_like(in.q));
  for (const auto& t : {grads.q, grads.k, grads.v}) EXPECT_TRUE(t.isfinite().all().item<bool>());
}

TEST(KernelsAttention, AmxTakesBfloat16) {
  if (machine_tier() != Tier::amx) GTEST_SKIP() << "this CPU has no amx";
  at::manual_seed(7);
  auto a = small_attention();
  a.left = 20, a.right = 0;
  EXPECT_EQ(choose_attention_tier(a, c10::DeviceType::CPU, at::kBFloat16, /*equal_lengths=*/true).tier, Tier::amx);
  const auto in = packed_heads(1, 50, 1, 2, 64);
  const auto dout = at::randn(in.q.sizes()).to(at::kBFloat16);
  const auto got = run(a, in);
  const auto grads = gradients(a, in, got, dout);
  const Result direct{at::empty_like(in.q), at::empty_like(got.logsumexp)};
  const DenseAttention dense{a, 0, in, direct.out, direct.logsumexp};
  amx::attention_forward(dense);
  const Qkv direct_grads{at::empty_like(in.q), at::empty_like(in.k), at::empty_like(in.v)};
  amx::attention_backward(dense, dout, direct_grads);
  EXPECT_TRUE(at::equal(got.out, direct.out) && at::equal(got.logsumexp, direct.logsumexp));
  EXPECT_TRUE(at::equal(grads.q, direct_grads.q) && at::equal(grads.k, direct_grads.k));
  EXPECT_TRUE(at::equal(grads.v, direct_grads.v));
}

/// Several threads share the keys of a head; the sums dQ of their parts are added in order.
TEST(KernelsAttention, Bfloat16GradientsOfManyThreadsAreDeterministic) {
  at::manual_seed(8);
  auto a = small_attention();
  a.right = 0;
  const auto in = packed_heads(1, 420, 2, 1, 32);
  const auto dout = at::randn(in.q.sizes()).to(at::kBFloat16);
  const Threads threads(16);
  const auto got = run(a, in);
  const auto first = gradients(a, in, got, dout), second = gradients(a, in, got, dout);
  EXPECT_TRUE(at::equal(first.q, second.q) && at::equal(first.k, second.k) && at::equal(first.v, second.v));
}

TEST(KernelsAttention, Bfloat16OfShortSequencesDoesNotDependOnThreads) {
  // MKL's float32 GEMM depends on the alignment of its operands, and the buffers of torch's kernel on the thread.
  if (!aten_gemm_is_native(at::kBFloat16)) GTEST_SKIP() << "this CPU has no bfloat16 instructions";
  at::manual_seed(6);
  auto a = small_attention();
  a.right = 0;
  const auto in = packed_heads(1, 200, 1, 2, 64);
  const auto dout = at::randn(in.q.sizes()).to(at::kBFloat16);
  const auto expected = run(a, in);
  const auto expected_grads = gradients(a, in, expected, dout);
  for (const int count : {1, 3, 8}) {
    const Threads threads(count);
    const auto got = run(a, in);
    const auto grads = gradients(a, in, got, dout);
    EXPECT_TRUE(at::equal(got.out, expected.out) && at::equal(got.logsumexp, expected.logsumexp));
    EXPECT_TRUE(at::equal(grads.q, expected_grads.q) && at::equal(grads.k, expected_grads.k));
    EXPECT_TRUE(at::equal(grads.v, expected_grads.v));
  }
}

}  // namespace
}  // namespace weft::kernels
