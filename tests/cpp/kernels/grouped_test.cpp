#include "weft/kernels/grouped.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "tests/cpp/kernels/compare.h"
#include "weft/kernels/launch.h"

namespace weft::kernels {
namespace {

using at::Tensor;
using Splits = std::vector<int64_t>;

const double kNan = std::numeric_limits<double>::quiet_NaN();

/// Random values of every layout that a call takes, and the truth in float64.
struct Problem {
  int64_t n, k, rows, active;
  Splits splits;
  at::ScalarType dtype;
  Tensor index, x, dy, w, bias, scales;  // w [G, n, k], bias [G, n], scales [rows]

  Problem(Splits given, int64_t n, int64_t k, at::ScalarType dtype, int64_t tail = 0)
      : n(n), k(k), splits(std::move(given)), dtype(dtype) {
    active = std::accumulate(splits.begin(), splits.end(), int64_t{0});
    rows = active + tail;
    const auto groups = static_cast<int64_t>(splits.size());
    const auto random = [&](at::IntArrayRef sizes, double scale) { return (at::randn(sizes) * scale).to(dtype); };
    index = at::tensor(splits, at::kLong);
    x = random({rows, k}, 1);
    dy = random({rows, n}, 1);
    w = random({groups, n, k}, 1 / std::sqrt(double(k)));
    bias = random({groups, n}, 1);
    scales = at::rand({rows}) + 0.5;
    if (tail > 0) {
      x.narrow(0, active, tail).fill_(kNan);
      dy.narrow(0, active, tail).fill_(kNan);
      scales.narrow(0, active, tail).fill_(kNan);
    }
  }

  GroupIndex opaque() const { return GroupIndex(index); }
  GroupedMatrix packed() const { return GroupedMatrix(w); }
  GroupedMatrix packed_bias() const { return GroupedMatrix(bias.unsqueeze(1)); }
  int64_t groups() const { return static_cast<int64_t>(splits.size()); }

  /// run(g, rows of group g) in order.
  template <class F>
  void each(const F& run) const {
    int64_t row = 0;
    for (int64_t g = 0; g < groups(); row += splits[g++])
      run(g, [row, count = splits[g]](const Tensor& t) { return t.narrow(0, row, count); });
  }
  Tensor forward(bool with_bias, bool with_scales) const {
    auto y = at::zeros({rows, n}, at::kDouble);
    each([&](int64_t g, const auto& part) {
      auto v = at::mm(exact(part(x)), exact(w[g]).t());
      if (with_bias && !with_scales) v = v + exact(bias[g]);
      if (with_scales) v = v + exact(part(scales)).unsqueeze(1) * exact(bias[g]);
      part(y).copy_(v);
    });
    return y;
  }
  Tensor data_gradient() const {
    auto dx = at::zeros({rows, k}, at::kDouble);
    each([&](int64_t g, const auto& part) { part(dx).copy_(at::mm(exact(part(dy)), exact(w[g]))); });
    return dx;
  }
  Tensor weight_gradient() const {
    auto dw = at::zeros({groups(), n, k}, at::kDouble);
    each([&](int64_t g, const auto& part) { dw[g].copy_(at::mm(exact(part(dy)).t(), exact(part(x)))); });
    return dw;
  }
};

/// Whether the engine multiplies, which rounds to the dtype before anything is added.
bool rounds_between(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) && (dtype != at::kBFloat16 || machine_tier() != Tier::amx);
}

/// One rounding, or two, and the error of float32 sums of `terms` terms of size 1.
void expect_close(const Tensor& got, const Tensor& truth, double terms, at::ScalarType dtype, const char* what) {
  ASSERT_EQ(got.sizes(), truth.sizes()) << what;
  if (got.numel() == 0) return;
  const auto unit = [](at::ScalarType t) {
    return t == at::kBFloat16 ? 0x1p-8 : t == at::kHalf ? 0x1p-11 : t == at::kFloat ? 0x1p-23 : 0x1p-50;
  };
  const double size = std::sqrt(terms + 1), sums = 64 * unit(dtype == at::kDouble ? dtype : at::kFloat) * size;
  const double once = unit(got.scalar_type()) * slack(), before = rounds_between(dtype) ? 4 * unit(dtype) * size : 0;
  const auto bound = truth.abs() * once * 1.01 + (sums + before + 1e-7);
  const auto error = (exact(got) - truth).abs();
  EXPECT_TRUE((error <= bound).all().item<bool>())
      << what << ": largest difference " << (error - bound).max().item<double>() << " over the bound; "
      << error.max().item<double>() << " of " << truth.abs().max().item<double>();
}

const std::vector<at::ScalarType> kAll{at::kBFloat16, at::kFloat, at::kHalf, at::kDouble};
const std::vector<GroupedPath> kPaths{GroupedPath::best, GroupedPath::split};

/// Forward, plain and with both kinds of bias, and both gradients, by each path, against float64.
void check(const Problem& p) {
  const auto truth = p.forward(false, false), biased = p.forward(true, false), scaled = p.forward(true, true);
  const auto dx = p.data_gradient(), dw = p.weight_gradient();
  const auto most = p.splits.empty() ? 0 : *std::max_element(p.splits.begin(), p.splits.end());
  for (const auto path : kPaths) {
    SCOPED_TRACE(path == GroupedPath::best ? "best" : "split");
    const auto run = [&](const GroupedEpilogue& e) { return grouped_gemm(p.opaque(), p.x, p.packed(), true, e); };
    expect_close(run({.path = path}), truth, 1, p.dtype, "y");
    expect_close(run({.bias = p.packed_bias(), .path = path}), biased, 1, p.dtype, "y with bias");
    expect_close(run({.bias = p.packed_bias(), .scales = p.scales, .path = path}), scaled, 2, p.dtype, "y with s·b");
    expect_close(grouped_gemm(p.opaque(), p.dy, p.packed(), false, {.path = path}), dx, double(p.n) / double(p.k),
                 p.dtype, "dx");
    for (const auto to : {p.dtype, p.dtype == at::kDouble ? at::kDouble : at::kFloat}) {
      auto out = at::full({p.groups(), p.n, p.k}, kNan, to);
      grouped_weight_gradient(p.opaque(), p.dy, p.x, GroupedMatrix(out), false, path);
      expect_close(out, dw, double(most), p.dtype, "dw");
      out.copy_(at::randn({p.groups(), p.n, p.k}));
      const auto before = exact(out).clone();
      grouped_weight_gradient(p.opaque(), p.dy, p.x, GroupedMatrix(out), true, path);
      expect_close(out, before + dw, double(most), p.dtype, "dw added");
    }
  }
}

Splits some_splits(int64_t groups, int64_t most, std::mt19937& chance) {
  Splits out(groups);
  for (auto& s : out) s = chance() % 3 == 0 ? 0 : static_cast<int64_t>(chance() % (most + 1));
  return out;
}

class KernelsGrouped : public testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(11);
    at::set_num_threads(1);
  }
  void TearDown() override { at::set_num_threads(1); }
  std::mt19937 chance_{7};
};

TEST_F(KernelsGrouped, EveryDtypeAndOddSize) {
  const std::vector<int64_t> sizes{1, 7, 16, 31, 32, 33, 64, 96, 100};
  for (const auto dtype : kAll)
    for (const auto n : sizes)
      for (const auto k : sizes) {
        const auto splits = some_splits(5, 40, chance_);
        SCOPED_TRACE(testing::Message() << dtype << " n " << n << " k " << k << " splits " << at::IntArrayRef(splits));
        check(Problem(splits, n, k, dtype, (n + k) % 3));
      }
}

TEST_F(KernelsGrouped, AnySplits) {
  const std::vector<Splits> all{{},         {0},         {5},          {0, 0, 0},       {0, 0, 77},
                                {77, 0, 0}, {0, 300, 0}, {16, 32, 48}, {17, 33, 1, 15}, {600, 1, 0, 40},
                                {1100}};
  for (const auto dtype : kAll)
    for (const auto& splits : all)
      for (const int64_t tail : {0, 3}) {
        SCOPED_TRACE(testing::Message() << dtype << " splits " << at::IntArrayRef(splits) << " tail " << tail);
        check(Problem(splits, 48, 96, dtype, tail));
      }
  for (int64_t groups = 1; groups <= 70; groups += 23)
    check(Problem(some_splits(groups, 12, chance_), 40, 72, at::kBFloat16));
}

TEST_F(KernelsGrouped, LongReductionsAndManyRows) {
  check(Problem({40, 3, 0, 129}, 70, 2500, at::kBFloat16));
  check(Problem({40, 3}, 2500, 70, at::kBFloat16));
  check(Problem({2100, 7}, 64, 70, at::kBFloat16));
  check(Problem({9}, 33, 17000, at::kBFloat16));
}

TEST_F(KernelsGrouped, RandomSweep) {
  for (int i = 0; i < 100; ++i) {
    const auto dtype = kAll[chance_() % 3];
    const auto n = 1 + static_cast<int64_t>(chance_() % 150), k = 1 + static_cast<int64_t>(chance_() % 150);
    const auto splits =
        some_splits(static_cast<int64_t>(chance_() % 20), 1 + static_cast<int64_t>(chance_() % 90), chance_);
    at::set_num_threads(1 + i % 3);
    SCOPED_TRACE(testing::Message() << dtype << " n " << n << " k " << k << " splits " << at::IntArrayRef(splits));
    check(Problem(splits, n, k, dtype, i % 4));
  }
}

TEST_F(KernelsGrouped, RowsOfNoGroupAreZeroInFreshMemoryAndStayInTheCallers) {
  for (const auto dtype : kAll)
    for (const auto path : kPaths) {
      const Problem p({3, 0, 20}, 32, 64, dtype, 5);
      const auto y = grouped_gemm(p.opaque(), p.x, p.packed(), true, {.path = path});
      EXPECT_TRUE(at::equal(y.narrow(0, 23, 5), at::zeros({5, 32}, dtype)));
      const auto out = at::full({28, 32}, 7, dtype);
      out.narrow(0, 0, 23).fill_(kNan);
      const auto same = grouped_gemm(p.opaque(), p.x, p.packed(), true, {.out = out, .path = path});
      EXPECT_TRUE(same.is_same(out));
      EXPECT_TRUE(at::equal(out.narrow(0, 0, 23), y.narrow(0, 0, 23)));
      EXPECT_TRUE(at::equal(out.narrow(0, 23, 5), at::full({5, 32}, 7, dtype)));
    }
}

TEST_F(KernelsGrouped, ListsAndNarrowSplitsEqualPackedOnes) {
  for (const auto dtype : kAll)
    for (const auto path : kPaths) {
      const Problem p({3, 0, 20, 40}, 48, 32, dtype, 2);
      std::vector<Tensor> w, b, dw;
      for (int64_t g = 0; g < 4; ++g) {
        w.push_back(p.w[g].clone());
        b.push_back(p.bias[g].clone());
        dw.push_back(at::full({48, 32}, kNan, dtype));
      }
      const GroupIndex narrow(p.index.to(at::kInt));
      const GroupedMatrix ws(w, 48, 32), bs(b, 1, 48);
      const auto want = grouped_gemm(p.opaque(), p.x, p.packed(), true, {.bias = p.packed_bias(), .path = path});
      EXPECT_TRUE(at::equal(want, grouped_gemm(narrow, p.x, ws, true, {.bias = bs, .path = path})));
      const auto packed = at::empty({4, 48, 32}, dtype);
      grouped_weight_gradient(p.opaque(), p.dy, p.x, GroupedMatrix(packed), false, path);
      grouped_weight_gradient(narrow, p.dy, p.x, GroupedMatrix(dw, 48, 32), false, path);
      EXPECT_TRUE(at::equal(packed, at::stack(dw)));
    }
}

TEST_F(KernelsGrouped, InputsMayHaveGapsBetweenRows) {
  for (const auto dtype : kAll) {
    Problem p({3, 0, 20, 40}, 48, 40, dtype);
    const auto apart = [](const Tensor& t) {
      const auto wide = at::full({t.size(0), t.size(1) + 24}, kNan, t.scalar_type()).narrow(1, 8, t.size(1));
      return wide.copy_(t);
    };
    p.x = apart(p.x), p.dy = apart(p.dy);
    check(p);
  }
}

TEST_F(KernelsGrouped, ScalesOfAnyDtype) {
  for (const auto dtype : kAll)
    for (const auto of : kAll) {
      Problem p({3, 0, 20, 40}, 48, 40, dtype, 2);
      p.scales = p.scales.to(of);
      check(p);
    }
}

TEST_F(KernelsGrouped, TheSameBitsOnAnyNumberOfThreads) {
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kHalf})
    for (const auto& splits :
         std::vector<Splits>{{900}, {0, 64, 3, 500}, {8, 8, 8, 8, 8, 8, 8, 8, 8}, {130, 1, 600, 2}}) {
      const bool tiles = machine_tier() == Tier::amx && dtype == at::kBFloat16;
      if (!tiles && splits[0] != 8) continue;  // larger products are the engine's
      const Problem p(splits, tiles ? 160 : 40, tiles ? 96 : 80, dtype, 1);
      const auto run = [&](int threads) {
        at::set_num_threads(threads);
        auto dw = at::zeros({p.groups(), p.n, p.k}, at::kFloat);
        grouped_weight_gradient(p.opaque(), p.dy, p.x, GroupedMatrix(dw), true);
        const auto sums = grouped_bias_gradient(p.opaque(), p.dy, p.scales, p.packed_bias(), true, true);
        return std::vector{
            grouped_gemm(p.opaque(), p.x, p.packed(), true, {.bias = p.packed_bias(), .scales = p.scales}),
            grouped_gemm(p.opaque(), p.x, p.packed(), true, {.bias = p.packed_bias()}),
            grouped_gemm(p.opaque(), p.dy, p.packed(), false),
            dw,
            sums.db,
            sums.ds};
      };
      const auto one = run(1);
      for (const int threads : {2, 3, 7}) {
        const auto many = run(threads);
        for (size_t i = 0; i < one.size(); ++i)
          EXPECT_TRUE(at::equal(one[i], many[i])) << dtype << at::IntArrayRef(splits) << threads << " result " << i;
      }
    }
}

TEST_F(KernelsGrouped, BiasGradients) {
  for (const auto dtype : kAll)
    for (const int64_t n : {1, 7, 16, 33, 100, 520})
      for (const auto& splits : std::vector<Splits>{{}, {0}, {5}, {3, 0, 20, 400, 0}})
        for (const bool scaled : {false, true}) {
          SCOPED_TRACE(testing::Message() << dtype << " n " << n << " splits " << at::IntArrayRef(splits));
          const Problem p(splits, n, 8, dtype, 3);
          auto db = at::zeros({p.groups(), n}, at::kDouble), ds = at::zeros({p.rows}, at::kDouble);
          p.each([&](int64_t g, const auto& part) {
            const auto dy = exact(part(p.dy));
            db[g].copy_((scaled ? dy * exact(part(p.scales)).unsqueeze(1) : dy).sum(0));
            part(ds).copy_((dy * exact(p.bias[g])).sum(1));
          });
          const auto got = grouped_bias_gradient(p.opaque(), p.dy, scaled ? p.scales : Tensor{}, p.packed_bias(), true,
                                                 /*ds_wanted=*/scaled);
          EXPECT_EQ(got.db.scalar_type(), dtype);
          expect_close(got.db, db, 400, dtype, "db");
          EXPECT_EQ(got.ds.defined(), scaled);
          if (!scaled) continue;
          EXPECT_EQ(got.ds.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
          expect_close(got.ds, ds, double(n), dtype, "ds");
        }
}

TEST_F(KernelsGrouped, BadSplitsRaise) {
  const auto run = [](const Splits& splits, at::ScalarType type, int64_t rows) {
    const auto groups = static_cast<int64_t>(splits.size());
    const GroupIndex index(at::tensor(splits, at::kLong).to(type));
    grouped_gemm(index, at::zeros({rows, 32}, at::kBFloat16), GroupedMatrix(at::zeros({groups, 16, 32}, at::kBFloat16)),
                 true);
  };
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_NO_THROW(run({3, 4}, at::kInt, 7));
  EXPECT_THROW(run({3, -1}, at::kLong, 7), c10::ValueError);
  EXPECT_THROW(run({3, 5}, at::kLong, 7), c10::ValueError);
  EXPECT_THROW(run({3, 5}, at::kInt, 7), c10::ValueError);
  EXPECT_THROW(run({huge, huge, 2}, at::kLong, 7), c10::ValueError);
  EXPECT_THROW(run({1, huge}, at::kLong, 7), c10::ValueError);
  EXPECT_THROW(run({3, 4}, at::kFloat, 7), c10::TypeError);
  try {
    run({3, -1}, at::kLong, 7);
  } catch (const c10::ValueError& e) {
    EXPECT_NE(std::string(e.what()).find("split 1 of 2 is -1"), std::string::npos) << e.what();
  }
}

TEST_F(KernelsGrouped, MetaTensorsGiveSizes) {
  const auto meta = [](at::IntArrayRef sizes, at::ScalarType type = at::kBFloat16) {
    return at::empty(sizes, at::TensorOptions(at::kMeta).dtype(type));
  };
  const GroupIndex index(meta({4}, at::kLong));
  const GroupedMatrix w(meta({4, 16, 32})), bias(meta({4, 1, 16}));
  const auto y = grouped_gemm(index, meta({9, 32}), w, true, {.bias = bias, .scales = meta({9})});
  EXPECT_EQ(y.sizes(), at::IntArrayRef({9, 16}));
  EXPECT_TRUE(y.is_meta());
  EXPECT_EQ(grouped_gemm(index, meta({9, 16}), w, false).sizes(), at::IntArrayRef({9, 32}));
  grouped_weight_gradient(index, meta({9, 16}), meta({9, 32}), w, true);
  const auto sums = grouped_bias_gradient(index, meta({9, 16}), {}, bias, true, true);
  EXPECT_EQ(sums.db.sizes(), at::IntArrayRef({4, 16}));
  EXPECT_EQ(sums.ds.sizes(), at::IntArrayRef({9}));
}

TEST_F(KernelsGrouped, ARecordingServesOtherSplits) {
  for (const auto dtype : kAll)
    for (const auto path : kPaths) {
      const Problem p({3, 0, 20, 40}, 48, 40, dtype);
      const auto dw = at::empty({4, 48, 40}, at::kFloat);
      const auto run = [&](const Tensor& index, const Tensor& gradient) {
        const GroupIndex opaque(index);
        grouped_weight_gradient(opaque, p.dy, p.x, GroupedMatrix(gradient), false, path);
        const auto sums = grouped_bias_gradient(opaque, p.dy, p.scales, p.packed_bias(), true, true);
        return std::vector{
            grouped_gemm(opaque, p.x, p.packed(), true, {.bias = p.packed_bias(), .scales = p.scales, .path = path}),
            grouped_gemm(opaque, p.dy, p.packed(), false, {.path = path}), sums.db, sums.ds};
      };
      const auto index = p.index.clone();
      Recording recording;
      const auto got = run(index, dw);
      recording.stop();
      EXPECT_EQ(recording.size(), 4U);
      for (const auto& splits : std::vector<Splits>{{30, 1, 2, 7}, {0, 0, 0, 63}, {0, 0, 0, 0}}) {
        index.copy_(at::tensor(splits, at::kLong));
        recording.replay();
        const auto fresh = at::empty_like(dw);
        const auto want = run(index, fresh);
        EXPECT_TRUE(at::equal(dw, fresh));
        for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << i;
      }
    }
}

TEST_F(KernelsGrouped, WeightsThatRequireGradAreNoConcern) {
  for (const auto dtype : kAll)
    for (const auto path : kPaths) {
      const Problem p({3, 0, 20}, 32, 64, dtype);
      p.w.requires_grad_();
      EXPECT_FALSE(grouped_gemm(p.opaque(), p.x, p.packed(), true, {.path = path}).requires_grad());
    }
}

}  // namespace
}  // namespace weft::kernels
