#include "weft/overlap/schedules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/cpp/comm/thread_transports.h"
#include "tests/cpp/kernels/gemm_bound.h"

namespace weft::testing {
namespace {

using at::Tensor;
using comm::ShmTransport;
using kernels::Bounded;
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
  static void expect_within(const Tensor& got, const Bounded& want) {
    if (const auto text = kernels::mismatch(got, want); !text.empty()) C10_THROW_ERROR(Error, text);
  }
  /// Sum of one GEMM per rank; each term may be rounded to the dtype before it is sent.
  static Bounded summed(const std::vector<Tensor>& xs, const std::vector<Tensor>& ws) {
    Bounded sum;
    for (size_t r = 0; r < xs.size(); ++r) {
      const auto dtype = xs[r].scalar_type();
      const auto part = kernels::rounded(kernels::bounded_gemm(xs[r], ws[r]), dtype);
      if (!sum.defined()) {
        sum = part;
        continue;
      }
      const auto both = kernels::scaled_sum(sum, 1, part.value, dtype);
      sum = {both.value, both.error + part.error};
      if (kernels::machine_tier() == kernels::Tier::ref) sum = kernels::rounded(sum, dtype);
    }
    return sum;
  }
  static Tensor block(const Tensor& t, int rank, int ranks) { return t.chunk(ranks, 0)[rank]; }
  static std::vector<Tensor> transposed(const std::vector<Tensor>& matrices) {
    std::vector<Tensor> views;
    for (const auto& m : matrices) views.push_back(m.t());
    return views;
  }
  static Bounded block(const Bounded& b, int rank, int ranks) {
    return {block(b.value, rank, ranks), block(b.error, rank, ranks)};
  }
};

constexpr int64_t kK = 96, kN = 64;
constexpr int64_t kRows[] = {1, 40, 7, 150, 33, 3};  // rows of a rank, one entry per call

TEST_P(Schedules, AllGatherGemmMatchesFullGemm) {
  std::vector<Tensor> xs;
  for (const auto rows : kRows) xs.push_back(random(rows * ranks(), kK));
  const auto w = random(kN, kK);
  const auto b = random(1, kN)[0];
  EXPECT_THAT(run_ranks(ranks(),
                        [&](ShmTransport& transport) {
                          for (const auto& x : xs) {
                            Tensor all;
                            const auto local = block(x, transport.rank(), ranks()).clone();
                            const auto y = overlap::all_gather_gemm(transport, local, kernels::transposed(w),
                                                                    {.bias = b, .b_is_weight = true}, &all);
                            const auto gemm = kernels::bounded_gemm(x, w.t());
                            const auto want = kernels::scaled_sum(gemm, 1, b, x.scalar_type());
                            expect_within(y.out, want);
                            const auto alone = overlap::all_gather_gemm(transport, local, kernels::transposed(w),
                                                                        {.bias = b}, nullptr);
                            expect_within(alone.out, want);  // may send packed rows
                            if (!all.equal(x)) C10_THROW_ERROR(Error, "wrong rows were gathered");
                          }
                        }),
              Each(""));
}

// Rows of quantized matrices; the codes, scales and maxima are those of the whole matrix.
class QuantizedSchedules : public ::testing::TestWithParam<int> {
 protected:
  static std::vector<kernels::Quantization> quantizations() {
    return {{},
            {.format = Format::e5m2},
            {.block = 128, .power_of_two = true},
            {.scale_format = ScaleFormat::e8m0, .block = 32},
            {.format = Format::e2m1, .scale_format = ScaleFormat::e4m3, .block = 16}};
  }
  static overlap::QuantizedBlock block_of(const kernels::QuantizedMatrix& rows) {
    const auto header = at::full({64}, rows.rows, at::kByte);
    return {at::cat({header, rows.rowwise.bytes}), 64, rows};
  }
  static void ignore(int, const Tensor&, const kernels::QuantizedMatrix&) {}
};

TEST_P(QuantizedSchedules, AllGatherGemmMatchesFullGemm) {
  const int ranks = GetParam();
  for (const auto& how : quantizations()) {
    const auto q_w = kernels::quantize(at::randn({kN, kK}).to(at::kBFloat16), how, {});
    std::vector<Tensor> xs;
    for (const auto rows : kRows) xs.push_back(at::randn({rows * ranks, kK}).to(at::kBFloat16));
    EXPECT_THAT(run_ranks(ranks,
                          [&](ShmTransport& transport) {
                            for (const auto& x : xs) {
                              const auto all = kernels::quantize(x, how, {});
                              kernels::QuantizeArgs args;
                              if (how.has_amax()) args.amax = all.rowwise.amax;
                              const auto local = x.chunk(ranks, 0)[transport.rank()];
                              std::vector<int> headers(ranks);
                              const auto y = overlap::all_gather_gemm(
                                  transport, block_of(kernels::quantize(local, how, args)), {q_w}, {},
                                  [&](int rank, const Tensor& header, const kernels::QuantizedMatrix& rows) {
                                    headers[rank] = header[0].item<int>() == rows.rows;
                                  });
                              headers[transport.rank()] = 1;
                              const auto gemm = kernels::bounded_gemm(kernels::dequantize(all, false, at::kFloat),
                                                                      kernels::dequantize(q_w, false, at::kFloat).t());
                              if (const auto text = kernels::mismatch(y.out, kernels::rounded(gemm, at::kBFloat16));
                                  !text.empty())
                                C10_THROW_ERROR(Error, text);
                              for (const int found : headers)
                                if (!found) C10_THROW_ERROR(Error, "wrong header");
                            }
                          }),
                Each(""));
  }
}

TEST_P(QuantizedSchedules, ErrorOfACheckIsRaisedAfterTheCollective) {
  const int ranks = GetParam();
  const auto x = at::randn({8, kK}).to(at::kBFloat16);
  const auto q_w = kernels::quantize(at::randn({kN, kK}).to(at::kBFloat16), {}, {});
  const auto rows = kernels::quantize(x, {}, {});
  EXPECT_THAT(run_ranks(ranks,
                        [&](ShmTransport& transport) {
                          const auto call = [&](const auto& check) {
                            return overlap::all_gather_gemm(transport, block_of(rows), {q_w}, {}, check);
                          };
                          std::string error;
                          try {
                            call([&](int rank, const Tensor&, const kernels::QuantizedMatrix&) {
                              TORCH_CHECK_VALUE(transport.rank() != 0, "rank ", rank, " does not fit");
                            });
                          } catch (const c10::ValueError& e) {
                            error = e.what_without_backtrace();
                          }
                          const bool expected = transport.rank() == 0;
                          if ((error == "rank 1 does not fit") != expected) C10_THROW_ERROR(Error, "error: " + error);
                          if (call(ignore).out.size(0) != 8 * ranks) C10_THROW_ERROR(Error, "wrong size");
                        }),
              Each(""));
}

INSTANTIATE_TEST_SUITE_P(Ranks, QuantizedSchedules, ::testing::Values(2, 3));

TEST_P(Schedules, GemmReduceScatterMatchesSumOverRanks) {
  std::vector<std::vector<Tensor>> xs;  // by call, by rank
  std::vector<Tensor> ws;
  for (int r = 0; r < ranks(); ++r) ws.push_back(random(kN, kK));
  for (const auto rows : kRows) {
    xs.emplace_back();
    for (int r = 0; r < ranks(); ++r) xs.back().push_back(random(rows * ranks(), kK));
  }
  EXPECT_THAT(run_ranks(ranks(),
                        [&](ShmTransport& transport) {
                          for (const auto& x : xs) {
                            const auto sum = summed(x, transposed(ws));
                            const auto& w = ws[transport.rank()];
                            const auto local = overlap::gemm_reduce_scatter(
                                transport, x[transport.rank()], kernels::transposed(w), {.b_is_weight = true});
                            expect_within(local, block(sum, transport.rank(), ranks()));
                            const auto all =
                                overlap::gemm_all_reduce(transport, x[transport.rank()].narrow(0, 0, x[0].size(0)),
                                                         kernels::transposed(w), {.b_is_weight = true});
                            expect_within(all, sum);
                          }
                        }),
              Each(""));
}

TEST_P(Schedules, GemmAllReduceTakesAnyRowCount) {
  std::vector<Tensor> xs, ws;
  for (int r = 0; r < ranks(); ++r) xs.push_back(random(13, kK)), ws.push_back(random(kN, kK));
  EXPECT_THAT(run_ranks(ranks(),
                        [&](ShmTransport& transport) {
                          for (int64_t rows = 0; rows <= 13; ++rows) {
                            std::vector<Tensor> parts;
                            for (const auto& x : xs) parts.push_back(x.narrow(0, 0, rows));
                            expect_within(overlap::gemm_all_reduce(transport, parts[transport.rank()],
                                                                   kernels::transposed(ws[transport.rank()]), {}),
                                          summed(parts, transposed(ws)));
                          }
                        }),
              Each(""));
}

TEST_P(Schedules, OverlappedCollectivesMatchReference) {
  const auto x = random(20 * ranks(), kK);
  std::vector<Tensor> dys, ws;
  for (int r = 0; r < ranks(); ++r) dys.push_back(random(20 * ranks(), kN)), ws.push_back(random(kN, kK));
  EXPECT_THAT(run_ranks(ranks(),
                        [&](ShmTransport& transport) {
                          for (int round = 0; round < 5; ++round) {
                            const auto local = block(x, transport.rank(), ranks()).clone();
                            overlap::OverlappedAllGather gather(transport, local);
                            overlap::OverlappedReduceScatter reduce(transport, dys[transport.rank()],
                                                                    ws[transport.rank()], {.b_is_weight = true},
                                                                    [&] { gather.progress(); });
                            if (!gather.wait().equal(x)) C10_THROW_ERROR(Error, "wrong rows were gathered");
                            reduce.progress();
                            expect_within(reduce.wait(), block(summed(dys, ws), transport.rank(), ranks()));
                          }
                        }),
              Each(""));
}

TEST_P(Schedules, AcceptsExpandedInput) {
  const auto w = random(kN, kK);
  const auto ones = random(1, 1).fill_(1).expand({8 * ranks(), kK});
  EXPECT_THAT(run_ranks(ranks(),
                        [&](ShmTransport& transport) {
                          const auto truth = kernels::bounded_gemm(ones, w.t());
                          const auto local = block(ones, transport.rank(), ranks());
                          expect_within(overlap::all_gather_gemm(transport, local, kernels::transposed(w), {}).out,
                                        truth);
                          const std::vector<Tensor> xs(ranks(), ones), ws(ranks(), w.t());
                          expect_within(overlap::gemm_reduce_scatter(transport, ones, kernels::transposed(w), {}),
                                        block(summed(xs, ws), transport.rank(), ranks()));
                        }),
              Each(""));
}

TEST_P(Schedules, SizeMismatchFailsEveryRank) {
  if (ranks() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const int64_t rows = 260;
  for (const bool wider : {false, true}) {
    const auto sizes = [&](int rank) { return std::pair{rows + (rank == 1 && !wider), kN + (rank == 1 && wider)}; };
    EXPECT_THAT(run_ranks(ranks(),
                          [&](ShmTransport& transport) {
                            const auto [local, n] = sizes(transport.rank());
                            overlap::gemm_reduce_scatter(transport, random(local * ranks(), kK),
                                                         kernels::transposed(random(n, kK)), {});
                          }),
                Each(HasSubstr(wider ? "reduce_scatter" : "261")));
    EXPECT_THAT(run_ranks(ranks(),
                          [&](ShmTransport& transport) {
                            const auto [local, k] = sizes(transport.rank());
                            overlap::all_gather_gemm(transport, random(local, k), kernels::transposed(random(kN, k)),
                                                     {});
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
