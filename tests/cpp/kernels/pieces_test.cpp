// A product in pieces: the same values as the whole product, whatever its cut, its order and the pace of its rows.
#include "weft/kernels/pieces.h"

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

Tensor random(at::IntArrayRef sizes, at::ScalarType dtype) { return at::randn(sizes).to(dtype); }

/// Rows with gaps between them.
Tensor apart(int64_t rows, int64_t columns, at::ScalarType dtype) {
  return random({rows, columns + 48}, dtype).narrow(1, 16, columns);
}

/// A [rows, K] that lies in `count` memories, and what has happened to it.
struct Cut {
  Pieces pieces;
  Tensor a;                    // all rows
  std::vector<int64_t> given;  // rows that were said to be ready
  std::vector<int64_t> done;   // rows that were said to be final

  Cut(int64_t rows, int64_t count, int64_t k, at::ScalarType dtype, std::mt19937& chance) {
    std::vector<int64_t> order(count);
    for (int64_t i = 0; i < count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), chance);
    const auto part = (rows + count - 1) / count;
    for (const auto i : order) {
      const auto row = std::min(rows, i * part), here = std::min(rows, row + part) - row;
      pieces.list.push_back({.a = apart(here, k, dtype), .row = row});
    }
    pieces.rows = rows;
    std::vector<Tensor> all(count);
    for (int64_t i = 0; i < count; ++i) all[order[i]] = pieces.list[i].a;
    a = at::cat(all);
    given.resize(count);
    done.resize(count);
  }
  /// Rows come a few at a time.
  void arrive_slowly(std::mt19937& chance) {
    pieces.ready = [this, &chance](int piece, int64_t from) {
      EXPECT_LE(from, given[piece]);
      given[piece] = std::min(rows_in(pieces.list[piece]), from + 1 + static_cast<int64_t>(chance() % 90));
      return given[piece];
    };
  }
  void watch() {
    pieces.done = [this](int piece, int64_t to) {
      EXPECT_GT(to, done[piece]);
      done[piece] = to;
    };
  }
  void expect_all_done() const {
    for (size_t i = 0; i < done.size(); ++i) EXPECT_EQ(done[i], rows_in(pieces.list[i]));
  }
};

class KernelsPieces : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    at::manual_seed(3);
    at::set_num_threads(1);
  }
  void TearDown() override { at::set_num_threads(1); }
  std::mt19937 chance_{5};
};

std::vector<Epilogue> epilogues(int64_t m, int64_t n, at::ScalarType dtype) {
  const Act gelu{}, swiglu{.kind = ActKind::swiglu};
  return {{},
          {.scale = 0.5, .bias = random({n}, dtype)},
          {.bias = random({n}, dtype), .act = gelu, .keep_pre = true},
          {.act = swiglu, .keep_pre = true},
          {.slope = gelu, .at = random({m, n}, dtype), .keep_again = true, .keep_sums = true},
          {.add = random({m, n}, dtype)},
          {.add = random({m, n}, at::kFloat), .dtype = at::kFloat}};
}

TEST_P(KernelsPieces, EqualTheWholeProductForEveryEpilogueAndPace) {
  int round = 0;
  for (const int64_t k : {31, 64, 1024, 4096})
    for (const int64_t m : {1, 70, 333}) {
      if (GetParam() != at::kBFloat16 && k * m > 70 * 1024) continue;  // nothing new there
      const int64_t n = k > 1000 ? 96 : 258;
      const auto b = random({n, k}, GetParam()).t();
      for (const auto& e : epilogues(m, n, GetParam())) {
        const int64_t count = 1 + static_cast<int64_t>(chance_() % 4);
        Cut cut(m, count, k, GetParam(), chance_);
        cut.watch();
        if (round % 2 == 1) cut.arrive_slowly(chance_);
        if (round % 3 == 1) cut.pieces.least = m;
        if (round % 5 == 1) cut.pieces.most = 50;
        at::set_num_threads(1 + round++ % 2);
        const BoundedGemm want(gemm_tier(cut.a, b, e), cut.a, b, e);
        expect_within(gemm(cut.pieces, b, e), want,
                      "k " + std::to_string(k) + ", m " + std::to_string(m) + ", " + std::to_string(count) + " pieces");
        cut.expect_all_done();
      }
    }
}

/// The rows of a piece.
Bounded rows_of(const Bounded& all, const Piece& piece) {
  return {all.value.narrow(0, piece.row, piece.a.size(0)), all.error.narrow(0, piece.row, piece.a.size(0))};
}
/// More addends; where ATen adds them it rounds after each.
Bounded with_addends(Bounded sum, const std::vector<Tensor>& addends) {
  for (const auto& t : addends) {
    sum = scaled_sum(sum, 1, t, t.scalar_type());
    if (machine_tier() == Tier::ref) sum = rounded(sum, t.scalar_type());
  }
  return sum;
}

TEST_P(KernelsPieces, GoWhereTheyAreSentAndTakeWhatIsAddedToThem) {
  for (const int64_t k : {48, 1300})
    for (const int64_t adds : {0, 1, 2, 3, 5})
      for (const int64_t m : {66, 150, 600}) {
        const int64_t n = 160;
        const auto b = random({k, n}, GetParam());
        const auto all = random({m, n}, GetParam()), bias = random({n}, GetParam());
        Cut cut(m, 3, k, GetParam(), chance_);
        if (adds % 2 == 1) cut.arrive_slowly(chance_);
        const Epilogue e{.bias = bias, .add = all};
        const auto want = BoundedGemm(gemm_tier(cut.a, b, e), cut.a, b, e).out;
        std::vector<Tensor> rows;
        for (size_t i = 0; i < cut.pieces.list.size(); ++i) {
          auto& piece = cut.pieces.list[i];
          const auto here = piece.a.size(0);
          if (i == 1) continue;  // one stays with the result
          piece.out = i == 0 ? apart(here, n, GetParam()) : random({here, n}, GetParam());
          for (int64_t j = 0; j < adds; ++j) piece.add.push_back(random({here, n}, GetParam()));
        }
        const auto got = gemm(cut.pieces, b, e);
        for (const auto& piece : cut.pieces.list) {
          const auto sum = with_addends(rows_of(want, piece), piece.add);
          const auto& out = piece.out.defined() ? piece.out : got.out.narrow(0, piece.row, piece.a.size(0));
          expect_within(
              out, sum,
              "k " + std::to_string(k) + ", m " + std::to_string(m) + ", " + std::to_string(adds) + " addends");
        }
      }
}

/// A matrix as squares of 32 x 32; what lies beyond it is not a number.
Tensor squares(const Tensor& m) {
  const auto rows = (m.size(0) + 31) / 32, columns = (m.size(1) + 31) / 32;
  const auto padded = at::full({rows * 32, columns * 32}, std::nan(""), m.options());
  padded.narrow(0, 0, m.size(0)).narrow(1, 0, m.size(1)).copy_(m);
  return padded.view({rows, 32, columns, 32}).permute({2, 0, 1, 3}).contiguous();
}
Tensor from_squares(const Tensor& t, int64_t rows, int64_t columns) {
  return t.permute({1, 2, 0, 3}).reshape({t.size(1) * 32, t.size(0) * 32}).narrow(0, 0, rows).narrow(1, 0, columns);
}

TEST_P(KernelsPieces, MayBeSquares) {
  for (const int64_t n : {160, 70})
    for (const int64_t k : {48, 1300})
      for (const int64_t adds : {0, 1, 3, 4}) {
        if (!in_squares(GetParam(), n, k)) GTEST_SKIP() << "only tiles make squares";
        const auto b = random({k, n}, GetParam());
        const int64_t m = 270;
        Cut cut(m, 2, k, GetParam(), chance_);
        if (adds > 1) cut.arrive_slowly(chance_);
        const auto want = bounded_product(cut.a, b);
        std::vector<Bounded> sums;
        for (auto& piece : cut.pieces.list) {
          const auto rows = piece.a.size(0);
          piece.out = squares(at::empty({rows, n}, piece.a.options()));
          std::vector<Tensor> addends;
          for (int64_t j = 0; j < adds; ++j) {
            addends.push_back(random({rows, n}, GetParam()));
            piece.add.push_back(squares(addends.back()));
          }
          sums.push_back(with_addends(rows_of(want, piece), addends));
        }
        EXPECT_FALSE(gemm(cut.pieces, b).out.defined());
        for (size_t i = 0; i < sums.size(); ++i)
          expect_within(
              from_squares(cut.pieces.list[i].out, sums[i].value.size(0), n), sums[i],
              "k " + std::to_string(k) + ", n " + std::to_string(n) + ", " + std::to_string(adds) + " addends");
      }
}

TEST_P(KernelsPieces, MayBePackedBefore) {
  for (const int64_t k : {48, 1024, 2500})
    for (const int64_t m : {5, 270, 700}) {
      const int64_t n = k == 2500 ? 3000 : 70;
      if (!in_squares(GetParam(), n, k)) GTEST_SKIP() << "only tiles take packed rows";
      const auto b = random({n, k}, GetParam()).t();
      Cut cut(m, 2, k, GetParam(), chance_);
      if (m == 270) cut.arrive_slowly(chance_);
      at::set_num_threads(m == 700 ? 2 : 1);
      for (auto& piece : cut.pieces.list) {
        if (piece.row == 0 && m == 700) continue;
        const auto rows = piece.a.size(0);
        const auto packed = at::full({(rows + 31) / 32, (k + 31) / 32 * 2, 16, 32}, std::nan(""), piece.a.options());
        pack_rows(piece.a, packed);
        piece.packed_rows = rows;
        piece.a = packed;
      }
      EXPECT_TRUE(gemm(cut.pieces, b).out.equal(gemm(cut.a, b).out)) << "k " << k << ", m " << m;
    }
}

TEST_P(KernelsPieces, MayBeEmpty) {
  const auto b = random({40, 24}, GetParam());
  Pieces pieces{.list = {{.a = random({0, 40}, GetParam())}, {.a = random({5, 40}, GetParam())}}, .rows = 5};
  EXPECT_EQ(gemm(pieces, b).out.sizes(), (std::vector<int64_t>{5, 24}));
  pieces.list.pop_back();
  pieces.rows = 0;
  EXPECT_EQ(gemm(pieces, b).out.sizes(), (std::vector<int64_t>{0, 24}));
}

TEST_P(KernelsPieces, RowsThatDoNotFitAreRefused) {
  const auto b = random({40, 24}, GetParam());
  EXPECT_THROW(gemm({.list = {{.a = random({5, 39}, GetParam())}}, .rows = 5}, b), c10::ValueError);
  EXPECT_THROW(gemm({.list = {{.a = random({5, 40}, GetParam()), .row = 1}}, .rows = 5}, b), c10::ValueError);
  EXPECT_THROW(gemm({.list = {{.a = random({5, 40}, GetParam()), .out = b}}, .rows = 5}, b), c10::ValueError);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, KernelsPieces, testing::Values(at::kFloat, at::kBFloat16, at::kHalf, at::kDouble),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(KernelsPiecesOfAFrozenWeight, EqualThoseOfAWeightPackedInTheCall) {
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
    Pieces pieces{.rows = kRows, .most = 256};
    for (int i = 0; i < 2; ++i)
      pieces.list.push_back(
          {.a = x.narrow(0, i * 350, 350), .out = at::empty({350, kSize}, x.options()), .row = i * 350});
    gemm(pieces, w.t(), {.weight = true});
    for (const auto& piece : pieces.list) EXPECT_TRUE(piece.out.equal(want.narrow(0, piece.row, 350)));
  }
  at::set_num_threads(1);
  EXPECT_EQ(packing_counts().packed - before.packed, 1);
  EXPECT_EQ(packing_counts().reused - before.reused, 1);
  thaw(w);
}

TEST(KernelsAddUp, SumsInTheWiderDtypeAndRoundsOnce) {
  at::manual_seed(3);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    for (const int64_t columns : {0, 1, 7, 33, 512}) {
      std::vector<Tensor> terms;
      auto want = at::zeros({9, columns}, at::kDouble);
      for (int i = 0; i < 4; ++i) {
        terms.push_back(i == 1 ? apart(9, columns, dtype) : random({9, columns}, dtype));
        want += terms.back();
      }
      const auto mixed = at::empty({9, columns}, at::kFloat);
      add_up(terms, mixed);
      add_up(terms, terms[2]);
      const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
      EXPECT_TRUE(at::allclose(mixed.to(at::kDouble), want, 1e-6, 1e-5));
      EXPECT_TRUE(at::allclose(terms[2].to(wide), want.to(wide), dtype == at::kBFloat16 ? 4e-3 : 1e-3, 1e-5));
    }
}

}  // namespace
}  // namespace weft::kernels
