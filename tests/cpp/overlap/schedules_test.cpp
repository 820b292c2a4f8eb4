#include "weft/overlap/schedules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/cpp/comm/thread_links.h"

namespace weft::testing {
namespace {

using at::Tensor;
using comm::SharedLink;
using ::testing::Each;
using ::testing::HasSubstr;

struct Case {
  int ranks;
  at::ScalarType dtype;
};

class Schedules : public ::testing::TestWithParam<Case> {
 protected:
  int ranks() const { return GetParam().ranks; }
  Tensor random(int64_t rows, int64_t columns) const {
    return at::randn({rows, columns}, at::TensorOptions().dtype(at::kDouble)).to(GetParam().dtype);
  }
  /// What `rank` got must be near `truth`, which is computed in float64.
  void expect_near(const Tensor& got, const Tensor& truth) const {
    const double bound = GetParam().dtype == at::kBFloat16 ? 2e-2 : GetParam().dtype == at::kFloat ? 1e-5 : 1e-12;
    if (got.sizes() != truth.sizes()) C10_THROW_ERROR(Error, c10::str(got.sizes(), " for ", truth.sizes()));
    const double error = (got.to(at::kDouble) - truth).norm().item<double>();
    const double size = truth.norm().item<double>();
    if (!(error <= bound * size)) C10_THROW_ERROR(Error, c10::str("off by ", error, " of ", size));
  }
  static Tensor wide(const Tensor& t) { return t.to(at::kDouble); }
  static Tensor block(const Tensor& t, int rank, int ranks) { return t.chunk(ranks, 0)[rank]; }
};

constexpr int64_t kK = 96, kN = 64;
constexpr int64_t kRows[] = {1, 40, 7, 150, 33, 3};  // of one rank, another in each round

TEST_P(Schedules, AGatherGivesTheProductOfAllRowsAndTheRows) {
  std::vector<Tensor> xs;
  for (const auto rows : kRows) xs.push_back(random(rows * ranks(), kK));
  const auto w = random(kN, kK);
  const auto b = random(1, kN)[0];
  EXPECT_THAT(run_ranks(ranks(),
                        [&](SharedLink& link) {
                          for (const auto& x : xs) {
                            Tensor all;
                            const auto mine = block(x, link.rank(), ranks()).clone();
                            const auto y = overlap::all_gather_gemm(link, mine, kernels::transposed(w),
                                                                    {.bias = b, .weight = true}, &all);
                            expect_near(y.out, at::matmul(wide(x), wide(w).t()) + wide(b));
                            if (!all.equal(x)) C10_THROW_ERROR(Error, "other rows were gathered");
                          }
                        }),
              Each(""));
}

TEST_P(Schedules, AScatterGivesTheSumOfAllRanks) {
  std::vector<std::vector<Tensor>> xs;  // by round, by rank
  std::vector<Tensor> ws;
  for (int r = 0; r < ranks(); ++r) ws.push_back(random(kN, kK));
  for (const auto rows : kRows) {
    xs.emplace_back();
    for (int r = 0; r < ranks(); ++r) xs.back().push_back(random(rows * ranks(), kK));
  }
  EXPECT_THAT(run_ranks(ranks(),
                        [&](SharedLink& link) {
                          for (const auto& x : xs) {
                            Tensor sum;
                            for (int r = 0; r < ranks(); ++r) {
                              const auto part = at::matmul(wide(x[r]), wide(ws[r]).t());
                              sum = sum.defined() ? sum + part : part;
                            }
                            const auto& w = ws[link.rank()];
                            const auto mine = overlap::gemm_reduce_scatter(link, x[link.rank()], kernels::transposed(w),
                                                                           {.weight = true});
                            expect_near(mine, block(sum, link.rank(), ranks()));
                            const auto all = overlap::gemm_all_reduce(link, x[link.rank()].narrow(0, 0, x[0].size(0)),
                                                                      kernels::transposed(w), {.weight = true});
                            expect_near(all, sum);
                          }
                        }),
              Each(""));
}

TEST_P(Schedules, AnAllReduceTakesAnyNumberOfRows) {
  std::vector<Tensor> xs, ws;
  for (int r = 0; r < ranks(); ++r) xs.push_back(random(13, kK)), ws.push_back(random(kN, kK));
  EXPECT_THAT(run_ranks(ranks(),
                        [&](SharedLink& link) {
                          for (int64_t rows = 0; rows <= 13; ++rows) {
                            Tensor sum;
                            for (int r = 0; r < ranks(); ++r) {
                              const auto part = at::matmul(wide(xs[r].narrow(0, 0, rows)), wide(ws[r]).t());
                              sum = sum.defined() ? sum + part : part;
                            }
                            expect_near(overlap::gemm_all_reduce(link, xs[link.rank()].narrow(0, 0, rows),
                                                                 kernels::transposed(ws[link.rank()]), {}),
                                        sum);
                          }
                        }),
              Each(""));
}

TEST_P(Schedules, AGatherAndAScatterGoUnderOtherProducts) {
  const auto x = random(20 * ranks(), kK);
  std::vector<Tensor> dys, ws;
  for (int r = 0; r < ranks(); ++r) dys.push_back(random(20 * ranks(), kN)), ws.push_back(random(kN, kK));
  EXPECT_THAT(run_ranks(ranks(),
                        [&](SharedLink& link) {
                          for (int round = 0; round < 5; ++round) {
                            const auto mine = block(x, link.rank(), ranks()).clone();
                            overlap::GatherUnder gather(link, mine);
                            overlap::ReduceUnder reduce(link, dys[link.rank()], ws[link.rank()], {.weight = true},
                                                        [&] { gather.advance(); });
                            if (!gather.wait().equal(x)) C10_THROW_ERROR(Error, "other rows were gathered");
                            reduce.advance();
                            Tensor sum;
                            for (int r = 0; r < ranks(); ++r) {
                              const auto part = at::matmul(wide(dys[r]), wide(ws[r]));
                              sum = sum.defined() ? sum + part : part;
                            }
                            expect_near(reduce.wait(), block(sum, link.rank(), ranks()));
                          }
                        }),
              Each(""));
}

TEST_P(Schedules, OneValueInAllPlacesIsAGradientToo) {
  const auto w = random(kN, kK);
  const auto ones = random(1, 1).fill_(1).expand({8 * ranks(), kK});
  EXPECT_THAT(run_ranks(ranks(),
                        [&](SharedLink& link) {
                          const auto truth = at::matmul(wide(ones), wide(w).t());
                          const auto mine = block(ones, link.rank(), ranks());
                          expect_near(overlap::all_gather_gemm(link, mine, kernels::transposed(w), {}).out, truth);
                          expect_near(overlap::gemm_reduce_scatter(link, ones, kernels::transposed(w), {}),
                                      block(truth, link.rank(), ranks()) * ranks());
                        }),
              Each(""));
}

TEST_P(Schedules, RanksWhoseSizesDifferByOneAllGetAnError) {
  if (ranks() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const int64_t rows = 260;
  for (const bool wider : {false, true}) {
    const auto sizes = [&](int rank) { return std::pair{rows + (rank == 1 && !wider), kN + (rank == 1 && wider)}; };
    EXPECT_THAT(run_ranks(ranks(),
                          [&](SharedLink& link) {
                            const auto [mine, n] = sizes(link.rank());
                            overlap::gemm_reduce_scatter(link, random(mine * ranks(), kK),
                                                         kernels::transposed(random(n, kK)), {});
                          }),
                Each(HasSubstr(wider ? "reduce_scatter" : "261")));
    EXPECT_THAT(run_ranks(ranks(),
                          [&](SharedLink& link) {
                            const auto [mine, k] = sizes(link.rank());
                            overlap::all_gather_gemm(link, random(mine, k), kernels::transposed(random(kN, k)), {});
                          }),
                Each(HasSubstr(wider ? "all_gather" : "261")));
  }
}

std::string name(const ::testing::TestParamInfo<Case>& info) {
  return c10::str(info.param.ranks, "Ranks", c10::toString(info.param.dtype));
}

INSTANTIATE_TEST_SUITE_P(Overlap, Schedules,
                         ::testing::Values(Case{1, at::kDouble}, Case{2, at::kDouble}, Case{2, at::kFloat},
                                           Case{2, at::kBFloat16}, Case{3, at::kDouble}, Case{3, at::kBFloat16},
                                           Case{4, at::kBFloat16}),
                         name);

}  // namespace
}  // namespace weft::testing
