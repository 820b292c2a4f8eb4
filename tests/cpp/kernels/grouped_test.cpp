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
#include "tests/cpp/kernels/gemm_bound.h"
#include "weft/kernels/launch.h"

namespace weft::kernels {
namespace {

using at::Tensor;
using Splits = std::vector<int64_t>;

const double kPoison = std::numeric_limits<double>::quiet_NaN();

/// Random inputs of a grouped GEMM, and its expected results in float64.
struct GroupedCase {
  int64_t n, k, rows, active;
  Splits splits;
  at::ScalarType dtype;
  Tensor index, x, dy, w, bias, scales;  // w [G, n, k], bias [G, n], scales [rows]

  GroupedCase(Splits given, int64_t n, int64_t k, at::ScalarType dtype, int64_t tail = 0)
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
      x.narrow(0, active, tail).fill_(kPoison);
      dy.narrow(0, active, tail).fill_(kPoison);
      scales.narrow(0, active, tail).fill_(kPoison);
    }
  }

  GroupIndex opaque() const { return GroupIndex(index); }
  GroupedMatrix stacked() const { return GroupedMatrix(w); }
  GroupedMatrix stacked_bias() const { return GroupedMatrix(bias.unsqueeze(1)); }
  int64_t groups() const { return static_cast<int64_t>(splits.size()); }

  /// Calls run(g, part) for each group; part(t) is a view of the group's rows of t.
  template <class F>
  void each(const F& run) const {
    int64_t row = 0;
    for (int64_t g = 0; g < groups(); row += splits[g++])
      run(g, [row, count = splits[g]](const Tensor& t) { return t.narrow(0, row, count); });
  }
  /// A [rows, columns] result with product(g, part) in the rows of each group.
  template <class F>
  Bounded by_rows(int64_t columns, const F& product) const {
    Bounded all{at::zeros({rows, columns}, at::kDouble), at::zeros({rows, columns}, at::kDouble)};
    each([&](int64_t g, const auto& part) {
      const Bounded one = product(g, part);
      part(all.value).copy_(one.value);
      part(all.error).copy_(one.error);
    });
    return all;
  }
  Bounded forward(bool with_bias, bool with_scales) const {
    return by_rows(n, [&](int64_t g, const auto& part) {
      auto v = bounded_gemm(part(x), w[g].t());
      auto b = in_float64(bias[g]).unsqueeze(0);
      if (with_scales) b = in_float64(part(scales)).unsqueeze(1) * b;
      if (with_bias) v = scaled_sum(v, 1, b, dtype);
      return v;
    });
  }
  Bounded data_gradient() const {
    return by_rows(k, [&](int64_t g, const auto& part) { return bounded_gemm(part(dy), w[g]); });
  }
  /// `before` + dYᵀ X of each group.
  Bounded weight_gradient(const Tensor& before) const {
    Bounded dw{before.clone(), at::zeros_like(before)};
    each([&](int64_t g, const auto& part) {
      const auto one = scaled_sum(bounded_gemm(part(dy).t(), part(x)), 1, before[g], dtype);
      dw.value[g].copy_(one.value);
      dw.error[g].copy_(one.error);
    });
    return dw;
  }
};

const std::vector<at::ScalarType> kAllDtypes{at::kBFloat16, at::kFloat, at::kHalf, at::kDouble};
const std::vector<GroupedPath> kPaths{GroupedPath::best, GroupedPath::split};

/// ATen rounds a GEMM to the dtype of its operands before it is added to a low-precision gradient.
Bounded as_stored(const Bounded& x, const GroupedCase& p, at::ScalarType to) {
  const bool by_aten = machine_tier() != Tier::amx || p.dtype != at::kBFloat16;
  return by_aten && at::isReducedFloatingType(p.dtype) && at::isReducedFloatingType(to) ? rounded(x, p.dtype) : x;
}

/// Checks forward (without bias, with bias, with scaled bias) and both gradients against float64, on each path.
void check(const GroupedCase& p) {
  const auto plain = p.forward(false, false), biased = p.forward(true, false), scaled = p.forward(true, true);
  const auto dx = p.data_gradient();
  for (const auto path : kPaths) {
    const std::string by = path == GroupedPath::best ? "best: " : "split: ";
    const auto run = [&](const GroupedEpilogue& e) { return grouped_gemm(p.opaque(), p.x, p.stacked(), true, e); };
    expect_within(run({.path = path}), plain, by + "y");
    expect_within(run({.bias = p.stacked_bias(), .path = path}), biased, by + "y with bias");
    expect_within(run({.bias = p.stacked_bias(), .scales = p.scales, .path = path}), scaled, by + "y with s·b");
    expect_within(grouped_gemm(p.opaque(), p.dy, p.stacked(), false, {.path = path}), dx, by + "dx");
    for (const auto to : {p.dtype, p.dtype == at::kDouble ? at::kDouble : at::kFloat}) {
      auto out = at::full({p.groups(), p.n, p.k}, kPoison, to);
      grouped_weight_gradient(p.opaque(), p.dy, p.x, GroupedMatrix(out), false, path);
      expect_within(out, p.weight_gradient(at::zeros_like(exact(out))), by + "dw");
      out.copy_(at::randn({p.groups(), p.n, p.k}));
      const auto want = as_stored(p.weight_gradient(exact(out)), p, to);
      grouped_weight_gradient(p.opaque(), p.dy, p.x, GroupedMatrix(out), true, path);
      expect_within(out, want, by + "dw accumulated");
    }
  }
}

Splits random_splits(int64_t groups, int64_t max_rows, std::mt19937& rng) {
  Splits out(groups);
  for (auto& s : out) s = rng() % 3 == 0 ? 0 : static_cast<int64_t>(rng() % (max_rows + 1));
  return out;
}

class KernelsGrouped : public testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(11);
    at::set_num_threads(1);
  }
  void TearDown() override { at::set_num_threads(1); }
  std::mt19937 rng_{7};
};

TEST_F(KernelsGrouped, MatchesFloat64ForEveryDtypeAndSize) {
  const std::vector<int64_t> sizes{1, 7, 16, 31, 32, 33, 64, 96, 100};
  for (const auto dtype : kAllDtypes)
    for (const auto n : sizes)
      for (const auto k : sizes) {
        const auto splits = random_splits(5, 40, rng_);
        SCOPED_TRACE(testing::Message() << dtype << " n " << n << " k " << k << " splits " << at::IntArrayRef(splits));
        check(GroupedCase(splits, n, k, dtype, (n + k) % 3));
      }
}

TEST_F(KernelsGrouped, SupportsAnySplits) {
  const std::vector<Splits> all{{},         {0},         {5},          {0, 0, 0},       {0, 0, 77},
                                {77, 0, 0}, {0, 300, 0}, {16, 32, 48}, {17, 33, 1, 15}, {600, 1, 0, 40},
                                {1100}};
  for (const auto dtype : kAllDtypes)
    for (const auto& splits : all)
      for (const int64_t tail : {0, 3}) {
        SCOPED_TRACE(testing::Message() << dtype << " splits " << at::IntArrayRef(splits) << " tail " << tail);
        check(GroupedCase(splits, 48, 96, dtype, tail));
      }
  for (int64_t groups = 1; groups <= 70; groups += 23)
    check(GroupedCase(random_splits(groups, 12, rng_), 40, 72, at::kBFloat16));
}

TEST_F(KernelsGrouped, SupportsLongReductionsAndManyRows) {
  check(GroupedCase({40, 3, 0, 129}, 70, 2500, at::kBFloat16));
  check(GroupedCase({40, 3}, 2500, 70, at::kBFloat16));
  check(GroupedCase({2100, 7}, 64, 70, at::kBFloat16));
  check(GroupedCase({9}, 33, 17000, at::kBFloat16));
}

TEST_F(KernelsGrouped, MatchesFloat64ForRandomShapes) {
  for (int i = 0; i < 100; ++i) {
    const auto dtype = kAllDtypes[rng_() % 3];
    const auto n = 1 + static_cast<int64_t>(rng_() % 150), k = 1 + static_cast<int64_t>(rng_() % 150);
    const auto splits = random_splits(static_cast<int64_t>(rng_() % 20), 1 + static_cast<int64_t>(rng_() % 90), rng_);
    at::set_num_threads(1 + i % 3);
    SCOPED_TRACE(testing::Message() << dtype << " n " << n << " k " << k << " splits " << at::IntArrayRef(splits));
    check(GroupedCase(splits, n, k, dtype, i % 4));
  }
}

TEST_F(KernelsGrouped, ZeroesUngroupedRowsOnlyInNewOutput) {
  for (const auto dtype : kAllDtypes)
    for (const auto path : kPaths) {
      const GroupedCase p({3, 0, 20}, 32, 64, dtype, 5);
      const auto y = grouped_gemm(p.opaque(), p.x, p.stacked(), true, {.path = path});
      EXPECT_TRUE(at::equal(y.narrow(0, 23, 5), at::zeros({5, 32}, dtype)));
      const auto out = at::full({28, 32}, 7, dtype);
      out.narrow(0, 0, 23).fill_(kPoison);
      const auto same = grouped_gemm(p.opaque(), p.x, p.stacked(), true, {.out = out, .path = path});
      EXPECT_TRUE(same.is_same(out));
      EXPECT_TRUE(at::equal(out.narrow(0, 0, 23), y.narrow(0, 0, 23)));
      EXPECT_TRUE(at::equal(out.narrow(0, 23, 5), at::full({5, 32}, 7, dtype)));
    }
}

TEST_F(KernelsGrouped, TensorListsAndInt32SplitsMatchStacked) {
  for (const auto dtype : kAllDtypes)
    for (const auto path : kPaths) {
      const GroupedCase p({3, 0, 20, 40}, 48, 32, dtype, 2);
      std::vector<Tensor> w, b, dw;
      for (int64_t g = 0; g < 4; ++g) {
        w.push_back(p.w[g].clone());
        b.push_back(p.bias[g].clone());
        dw.push_back(at::full({48, 32}, kPoison, dtype));
      }
      const GroupIndex narrow(p.index.to(at::kInt));
      const GroupedMatrix ws(w, 48, 32), bs(b, 1, 48);
      const auto want = grouped_gemm(p.opaque(), p.x, p.stacked(), true, {.bias = p.stacked_bias(), .path = path});
      EXPECT_TRUE(at::equal(want, grouped_gemm(narrow, p.x, ws, true, {.bias = bs, .path = path})));
      const auto stacked = at::empty({4, 48, 32}, dtype);
      grouped_weight_gradient(p.opaque(), p.dy, p.x, GroupedMatrix(stacked), false, path);
      grouped_weight_gradient(narrow, p.dy, p.x, GroupedMatrix(dw, 48, 32), false, path);
      EXPECT_TRUE(at::equal(stacked, at::stack(dw)));
    }
}

TEST_F(KernelsGrouped, SupportsRowStrides) {
  for (const auto dtype : kAllDtypes) {
    GroupedCase p({3, 0, 20, 40}, 48, 40, dtype);
    const auto with_row_gaps = [](const Tensor& t) {
      const auto strided = at::full({t.size(0), t.size(1) + 24}, kPoison, t.scalar_type()).narrow(1, 8, t.size(1));
      return strided.copy_(t);
    };
    p.x = with_row_gaps(p.x), p.dy = with_row_gaps(p.dy);
    check(p);
  }
}

TEST_F(KernelsGrouped, SupportsScalesOfAnyDtype) {
  for (const auto dtype : kAllDtypes)
    for (const auto of : kAllDtypes) {
      GroupedCase p({3, 0, 20, 40}, 48, 40, dtype, 2);
      p.scales = p.scales.to(of);
      check(p);
    }
}

TEST_F(KernelsGrouped, IsBitwiseEqualForAnyThreadCount) {
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kHalf})
    for (const auto& splits :
         std::vector<Splits>{{900}, {0, 64, 3, 500}, {8, 8, 8, 8, 8, 8, 8, 8, 8}, {130, 1, 600, 2}}) {
      const bool on_amx = machine_tier() == Tier::amx && dtype == at::kBFloat16;
      if (!on_amx && splits[0] != 8) continue;  // ATen computes larger GEMMs
      const GroupedCase p(splits, on_amx ? 160 : 40, on_amx ? 96 : 80, dtype, 1);
      const auto run = [&](int threads) {
        at::set_num_threads(threads);
        auto dw = at::zeros({p.groups(), p.n, p.k}, at::kFloat);
        grouped_weight_gradient(p.opaque(), p.dy, p.x, GroupedMatrix(dw), true);
        const auto sums = grouped_bias_gradient(p.opaque(), p.dy, p.scales, p.stacked_bias(), true, true);
        return std::vector{
            grouped_gemm(p.opaque(), p.x, p.stacked(), true, {.bias = p.stacked_bias(), .scales = p.scales}),
            grouped_gemm(p.opaque(), p.x, p.stacked(), true, {.bias = p.stacked_bias()}),
            grouped_gemm(p.opaque(), p.dy, p.stacked(), false),
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

TEST_F(KernelsGrouped, BiasGradientsMatchFloat64) {
  for (const auto dtype : kAllDtypes)
    for (const int64_t n : {1, 7, 16, 33, 100, 520})
      for (const auto& splits : std::vector<Splits>{{}, {0}, {5}, {3, 0, 20, 400, 0}})
        for (const bool scaled : {false, true}) {
          SCOPED_TRACE(testing::Message() << dtype << " n " << n << " splits " << at::IntArrayRef(splits));
          const GroupedCase p(splits, n, 8, dtype, 3);
          const auto zeros = [](at::IntArrayRef sizes) { return at::zeros(sizes, at::kDouble); };
          Bounded db{zeros({p.groups(), n}), zeros({p.groups(), n})}, ds{zeros({p.rows}), zeros({p.rows})};
          p.each([&](int64_t g, const auto& part) {
            const auto dy = exact(part(p.dy));
            const auto terms = scaled ? dy * exact(part(p.scales)).unsqueeze(1) : dy, dots = dy * exact(p.bias[g]);
            db.value[g].copy_(terms.sum(0));
            db.error[g].copy_(terms.abs().sum(0) * summation(dy.size(0) + 1, dtype));
            part(ds.value).copy_(dots.sum(1));
            part(ds.error).copy_(dots.abs().sum(1) * summation(n + 1, dtype));
          });
          const auto got = grouped_bias_gradient(p.opaque(), p.dy, scaled ? p.scales : Tensor{}, p.stacked_bias(), true,
                                                 /*needs_ds=*/scaled);
          EXPECT_EQ(got.db.scalar_type(), dtype);
          expect_within(got.db, db, "db");
          EXPECT_EQ(got.ds.defined(), scaled);
          if (!scaled) continue;
          EXPECT_EQ(got.ds.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
          expect_within(got.ds, ds, "ds");
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

TEST_F(KernelsGrouped, InfersShapesOnMeta) {
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

TEST_F(KernelsGrouped, RecordingReplaysOtherSplits) {
  for (const auto dtype : kAllDtypes)
    for (const auto path : kPaths) {
      const GroupedCase p({3, 0, 20, 40}, 48, 40, dtype);
      const auto dw = at::empty({4, 48, 40}, at::kFloat);
      const auto run = [&](const Tensor& index, const Tensor& gradient) {
        const GroupIndex opaque(index);
        grouped_weight_gradient(opaque, p.dy, p.x, GroupedMatrix(gradient), false, path);
        const auto sums = grouped_bias_gradient(opaque, p.dy, p.scales, p.stacked_bias(), true, true);
        return std::vector{
            grouped_gemm(opaque, p.x, p.stacked(), true, {.bias = p.stacked_bias(), .scales = p.scales, .path = path}),
            grouped_gemm(opaque, p.dy, p.stacked(), false, {.path = path}), sums.db, sums.ds};
      };
      const auto index = p.index.clone();
      LaunchRecording recording;
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

TEST_F(KernelsGrouped, IgnoresRequiresGradOfWeights) {
  for (const auto dtype : kAllDtypes)
    for (const auto path : kPaths) {
      const GroupedCase p({3, 0, 20}, 32, 64, dtype);
      p.w.requires_grad_();
      EXPECT_FALSE(grouped_gemm(p.opaque(), p.x, p.stacked(), true, {.path = path}).requires_grad());
    }
}

}  // namespace
}  // namespace weft::kernels
