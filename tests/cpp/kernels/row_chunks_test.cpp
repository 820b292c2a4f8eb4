// A GEMM in row chunks equals the unsplit GEMM for any chunk sizes, order and arrival of rows.
#include "weft/kernels/row_chunks.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/cpp/kernels/gemm_bound.h"
#include "weft/kernels/packing.h"
#include "weft/kernels/rows.h"

namespace weft::kernels {
namespace {

using at::Tensor;

/// A matrix whose row stride is larger than its row length.
Tensor with_row_gaps(int64_t rows, int64_t columns, at::ScalarType dtype) {
  return random({rows, columns + 48}, dtype).narrow(1, 16, columns);
}

/// A [rows, K] in `count` chunks, with a record of the callbacks.
struct ChunkedInput {
  RowChunks chunks;
  Tensor a;                    // all rows
  std::vector<int64_t> ready;  // per chunk: rows that `ready` returned
  std::vector<int64_t> done;   // per chunk: rows that `on_done` reported

  ChunkedInput(int64_t rows, int64_t count, int64_t k, at::ScalarType dtype, std::mt19937& rng) {
    std::vector<int64_t> order(count);
    for (int64_t i = 0; i < count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), rng);
    const auto chunk_rows = (rows + count - 1) / count;
    for (const auto i : order) {
      const auto row = std::min(rows, i * chunk_rows), here = std::min(rows, row + chunk_rows) - row;
      chunks.list.push_back({.a = with_row_gaps(here, k, dtype), .row = row});
    }
    chunks.rows = rows;
    std::vector<Tensor> all(count);
    for (int64_t i = 0; i < count; ++i) all[order[i]] = chunks.list[i].a;
    a = at::cat(all);
    ready.resize(count);
    done.resize(count);
  }
  /// Rows become ready a few at a time.
  void arrive_slowly(std::mt19937& rng) {
    chunks.ready = [this, &rng](int chunk, int64_t from) {
      EXPECT_LE(from, ready[chunk]);
      ready[chunk] = std::min(row_count(chunks.list[chunk]), from + 1 + static_cast<int64_t>(rng() % 90));
      return ready[chunk];
    };
  }
  void track_done() {
    chunks.on_done = [this](int chunk, int64_t to) {
      EXPECT_GT(to, done[chunk]);
      done[chunk] = to;
    };
  }
  void expect_all_done() const {
    for (size_t i = 0; i < done.size(); ++i) EXPECT_EQ(done[i], row_count(chunks.list[i]));
  }
};

class KernelsRowChunks : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    at::manual_seed(3);
    at::set_num_threads(1);
  }
  void TearDown() override { at::set_num_threads(1); }
  std::mt19937 rng_{5};
};

std::vector<Epilogue> epilogues(int64_t m, int64_t n, at::ScalarType dtype) {
  const Act gelu{}, swiglu{.kind = ActKind::swiglu};
  return {{},
          {.scale = 0.5, .bias = random({n}, dtype)},
          {.bias = random({n}, dtype), .act = gelu, .keep_pre_act = true},
          {.act = swiglu, .keep_pre_act = true},
          {.act_grad = gelu, .act_input = random({m, n}, dtype), .keep_act_output = true, .keep_column_sums = true},
          {.addend = random({m, n}, dtype)},
          {.addend = random({m, n}, at::kFloat), .dtype = at::kFloat}};
}

TEST_P(KernelsRowChunks, MatchUnsplitGemmForEveryEpilogue) {
  int round = 0;
  for (const int64_t k : {31, 64, 1024, 4096})
    for (const int64_t m : {1, 70, 333}) {
      if (GetParam() != at::kBFloat16 && k * m > 70 * 1024) continue;  // no other code path, only time
      const int64_t n = k > 1000 ? 96 : 258;
      const auto b = random({n, k}, GetParam()).t();
      for (const auto& e : epilogues(m, n, GetParam())) {
        const int64_t count = 1 + static_cast<int64_t>(rng_() % 4);
        ChunkedInput chunked(m, count, k, GetParam(), rng_);
        chunked.track_done();
        if (round % 2 == 1) chunked.arrive_slowly(rng_);
        if (round % 3 == 1) chunked.chunks.min_block_rows = m;
        if (round % 5 == 1) chunked.chunks.max_block_rows = 50;
        at::set_num_threads(1 + round++ % 2);
        const BoundedGemm want(gemm_tier(chunked.a, b, e), chunked.a, b, e);
        expect_within(
            gemm(chunked.chunks, b, e), want,
            "k " + std::to_string(k) + ", m " + std::to_string(m) + ", " + std::to_string(count) + " row chunks");
        chunked.expect_all_done();
      }
    }
}

/// The rows of a chunk.
Bounded rows_of(const Bounded& all, const RowChunk& chunk) {
  return {all.value.narrow(0, chunk.row, chunk.a.size(0)), all.error.narrow(0, chunk.row, chunk.a.size(0))};
}
/// Adds `addends`; the `ref` tier rounds after each.
Bounded with_addends(Bounded sum, const std::vector<Tensor>& addends) {
  for (const auto& t : addends) {
    sum = scaled_sum(sum, 1, t, t.scalar_type());
    if (machine_tier() == Tier::ref) sum = rounded(sum, t.scalar_type());
  }
  return sum;
}

TEST_P(KernelsRowChunks, WriteTheirOutputsAndAddAddends) {
  for (const int64_t k : {48, 1300})
    for (const int64_t num_addends : {0, 1, 2, 3, 5})
      for (const int64_t m : {66, 150, 600}) {
        const int64_t n = 160;
        const auto b = random({k, n}, GetParam());
        const auto all = random({m, n}, GetParam()), bias = random({n}, GetParam());
        ChunkedInput chunked(m, 3, k, GetParam(), rng_);
        if (num_addends % 2 == 1) chunked.arrive_slowly(rng_);
        const Epilogue e{.bias = bias, .addend = all};
        const auto want = BoundedGemm(gemm_tier(chunked.a, b, e), chunked.a, b, e).out;
        std::vector<Tensor> rows;
        for (size_t i = 0; i < chunked.chunks.list.size(); ++i) {
          auto& chunk = chunked.chunks.list[i];
          const auto here = chunk.a.size(0);
          if (i == 1) continue;  // this chunk writes to the common result
          chunk.out = i == 0 ? with_row_gaps(here, n, GetParam()) : random({here, n}, GetParam());
          for (int64_t j = 0; j < num_addends; ++j) chunk.addends.push_back(random({here, n}, GetParam()));
        }
        const auto got = gemm(chunked.chunks, b, e);
        for (const auto& chunk : chunked.chunks.list) {
          const auto sum = with_addends(rows_of(want, chunk), chunk.addends);
          const auto& out = chunk.out.defined() ? chunk.out : got.out.narrow(0, chunk.row, chunk.a.size(0));
          expect_within(
              out, sum,
              "k " + std::to_string(k) + ", m " + std::to_string(m) + ", " + std::to_string(num_addends) + " addends");
        }
      }
}

/// A matrix in the blocked layout, padded with NaN.
Tensor to_blocked(const Tensor& m) {
  const auto rows = (m.size(0) + 31) / 32, columns = (m.size(1) + 31) / 32;
  const auto padded = at::full({rows * 32, columns * 32}, std::nan(""), m.options());
  padded.narrow(0, 0, m.size(0)).narrow(1, 0, m.size(1)).copy_(m);
  return padded.view({rows, 32, columns, 32}).permute({2, 0, 1, 3}).contiguous();
}
Tensor from_blocked(const Tensor& t, int64_t rows, int64_t columns) {
  return t.permute({1, 2, 0, 3}).reshape({t.size(1) * 32, t.size(0) * 32}).narrow(0, 0, rows).narrow(1, 0, columns);
}

TEST_P(KernelsRowChunks, SupportBlockedLayout) {
  for (const int64_t n : {160, 70})
    for (const int64_t k : {48, 1300})
      for (const int64_t num_addends : {0, 1, 3, 4}) {
        if (!supports_blocked_layout(GetParam(), n, k)) GTEST_SKIP() << "only the amx tier supports the blocked layout";
        const auto b = random({k, n}, GetParam());
        const int64_t m = 270;
        ChunkedInput chunked(m, 2, k, GetParam(), rng_);
        if (num_addends > 1) chunked.arrive_slowly(rng_);
        const auto want = bounded_gemm(chunked.a, b);
        std::vector<Bounded> sums;
        for (auto& chunk : chunked.chunks.list) {
          const auto rows = chunk.a.size(0);
          chunk.out = to_blocked(at::empty({rows, n}, chunk.a.options()));
          std::vector<Tensor> addends;
          for (int64_t j = 0; j < num_addends; ++j) {
            addends.push_back(random({rows, n}, GetParam()));
            chunk.addends.push_back(to_blocked(addends.back()));
          }
          sums.push_back(with_addends(rows_of(want, chunk), addends));
        }
        EXPECT_FALSE(gemm(chunked.chunks, b).out.defined());
        for (size_t i = 0; i < sums.size(); ++i)
          expect_within(
              from_blocked(chunked.chunks.list[i].out, sums[i].value.size(0), n), sums[i],
              "k " + std::to_string(k) + ", n " + std::to_string(n) + ", " + std::to_string(num_addends) + " addends");
      }
}

TEST_P(KernelsRowChunks, AcceptPackedRows) {
  for (const int64_t k : {48, 1024, 2500})
    for (const int64_t m : {5, 270, 700}) {
      const int64_t n = k == 2500 ? 3000 : 70;
      if (!supports_blocked_layout(GetParam(), n, k)) GTEST_SKIP() << "only the amx tier takes packed rows";
      const auto b = random({n, k}, GetParam()).t();
      ChunkedInput chunked(m, 2, k, GetParam(), rng_);
      if (m == 270) chunked.arrive_slowly(rng_);
      at::set_num_threads(m == 700 ? 2 : 1);
      for (auto& chunk : chunked.chunks.list) {
        if (chunk.row == 0 && m == 700) continue;
        const auto rows = chunk.a.size(0);
        const auto packed = at::full({(rows + 31) / 32, (k + 31) / 32 * 2, 16, 32}, std::nan(""), chunk.a.options());
        pack_rows(chunk.a, packed);
        chunk.packed_rows = rows;
        chunk.a = packed;
      }
      EXPECT_TRUE(gemm(chunked.chunks, b).out.equal(gemm(chunked.a, b).out)) << "k " << k << ", m " << m;
    }
}

TEST_P(KernelsRowChunks, MayBeEmpty) {
  const auto b = random({40, 24}, GetParam());
  RowChunks chunks{.list = {{.a = random({0, 40}, GetParam())}, {.a = random({5, 40}, GetParam())}}, .rows = 5};
  EXPECT_EQ(gemm(chunks, b).out.sizes(), (std::vector<int64_t>{5, 24}));
  chunks.list.pop_back();
  chunks.rows = 0;
  EXPECT_EQ(gemm(chunks, b).out.sizes(), (std::vector<int64_t>{0, 24}));
}

TEST_P(KernelsRowChunks, RejectMismatchedRows) {
  const auto b = random({40, 24}, GetParam());
  EXPECT_THROW(gemm({.list = {{.a = random({5, 39}, GetParam())}}, .rows = 5}, b), c10::ValueError);
  EXPECT_THROW(gemm({.list = {{.a = random({5, 40}, GetParam()), .row = 1}}, .rows = 5}, b), c10::ValueError);
  EXPECT_THROW(gemm({.list = {{.a = random({5, 40}, GetParam()), .out = b}}, .rows = 5}, b), c10::ValueError);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, KernelsRowChunks, testing::Values(at::kFloat, at::kBFloat16, at::kHalf, at::kDouble),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(KernelsRowChunksFrozenWeight, MatchesUnfrozenWeight) {
  if (machine_tier() != Tier::amx) GTEST_SKIP() << "weights are packed by the amx tier only";
  at::manual_seed(3);
  constexpr int64_t kSize = 512, kRows = 700;
  const auto w = random({kSize, kSize}, at::kBFloat16);
  const auto x = random({kRows, kSize}, at::kBFloat16);
  const auto want = gemm(x, w.clone().t()).out;
  freeze(w);
  const auto before = packing_counts();
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    RowChunks chunks{.rows = kRows, .max_block_rows = 256};
    for (int i = 0; i < 2; ++i)
      chunks.list.push_back(
          {.a = x.narrow(0, i * 350, 350), .out = at::empty({350, kSize}, x.options()), .row = i * 350});
    gemm(chunks, w.t(), {.b_is_weight = true});
    for (const auto& chunk : chunks.list) EXPECT_TRUE(chunk.out.equal(want.narrow(0, chunk.row, 350)));
  }
  at::set_num_threads(1);
  EXPECT_EQ(packing_counts().packed - before.packed, 1);
  EXPECT_EQ(packing_counts().reused - before.reused, 1);
  unfreeze(w);
}

TEST(KernelsSumTerms, SumsInOpmathAndRoundsOnce) {
  at::manual_seed(3);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    for (const int64_t columns : {0, 1, 7, 33, 512}) {
      std::vector<Tensor> terms;
      auto want = at::zeros({9, columns}, at::kDouble);
      for (int i = 0; i < 4; ++i) {
        terms.push_back(i == 1 ? with_row_gaps(9, columns, dtype) : random({9, columns}, dtype));
        want += terms.back();
      }
      const auto mixed = at::empty({9, columns}, at::kFloat);
      sum_terms(terms, mixed);
      sum_terms(terms, terms[2]);
      const auto opmath = dtype == at::kDouble ? at::kDouble : at::kFloat;
      EXPECT_TRUE(at::allclose(mixed.to(at::kDouble), want, 1e-6, 1e-5));
      EXPECT_TRUE(at::allclose(terms[2].to(opmath), want.to(opmath), dtype == at::kBFloat16 ? 4e-3 : 1e-3, 1e-5));
    }
}

}  // namespace
}  // namespace weft::kernels
