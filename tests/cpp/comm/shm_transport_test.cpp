#include "weft/comm/shm_transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/cpp/comm/thread_transports.h"
#include "weft/comm/free_memory.h"

namespace weft::testing {
namespace {

using comm::InFlightCollective;
using comm::ShmTransport;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

/// What rank `from` writes for rank `to` in round `round`: each value identifies its position.
float value(int from, int to, int64_t round, int64_t i) {
  return static_cast<float>(from * 100 + to * 10) + static_cast<float>((round * 7 + i) % 1000) * 1000;
}

/// Plain loops, which ThreadSanitizer instruments.
void fill(const at::Tensor& block, int from, int to, int64_t round, int64_t begin, int64_t end) {
  auto* data = block.data_ptr<float>();
  for (int64_t i = begin * block.size(1); i < end * block.size(1); ++i) data[i] = value(from, to, round, i);
}

void expect_filled(const at::Tensor& block, int from, int to, int64_t round) {
  const auto* data = block.const_data_ptr<float>();
  for (int64_t i = 0; i < block.numel(); ++i)
    if (data[i] != value(from, to, round, i)) C10_THROW_ERROR(Error, c10::str("round ", round, " of rank ", from));
}

struct RandomSource {
  std::mt19937 random;
  int64_t up_to(int64_t n) { return static_cast<int64_t>(random() % (n + 1)); }
  void random_delay() {
    if (up_to(3) == 0) std::this_thread::sleep_for(std::chrono::microseconds(up_to(200)));
  }
};

constexpr int kAll = 9;  // `to` of an all-gather block

std::unique_ptr<InFlightCollective> start_gather(ShmTransport& transport, int64_t rows, int64_t columns,
                                                 int64_t round) {
  auto local = at::empty({rows, columns});
  fill(local, transport.rank(), kAll, round, 0, rows);
  return transport.all_gather(local);
}

void end_gather(ShmTransport& transport, InFlightCollective& collective, int64_t rows, int64_t round) {
  for (int step = 1; step < transport.size(); ++step) {
    const int from = (transport.rank() + step) % transport.size();
    collective.wait(from, rows);
    expect_filled(collective.incoming(from), from, kAll, round);
  }
  collective.finish();
}

void scatter(ShmTransport& transport, int64_t rows, int64_t columns, int64_t round, RandomSource& random) {
  const auto collective = transport.reduce_scatter(rows, columns, at::kFloat);
  for (int step = 1; step < transport.size(); ++step) {
    const int to = (transport.rank() + step) % transport.size();
    const auto block = collective->outgoing(to);
    for (int64_t from = 0; from < rows;) {
      const int64_t end = std::min(rows, from + 1 + random.up_to(rows));
      fill(block, transport.rank(), to, round, from, end);
      collective->mark_ready(to, end);
      from = end;
    }
  }
  for (int step = 1; step < transport.size(); ++step) {
    const int from = (transport.rank() + step) % transport.size();
    collective->wait(from, rows);
    expect_filled(collective->incoming(from), from, transport.rank(), round);
    random.random_delay();
  }
  collective->finish();
}

TEST(ShmTransport, EveryRankReadsBlocksOfItsPeers) {
  for (const int size : {1, 2, 3, 4}) {
    const auto errors = run_ranks(size, [](ShmTransport& transport) {
      RandomSource sizes{std::mt19937(5)}, own{std::mt19937(transport.rank())};  // all ranks use the same sizes
      for (int64_t round = 0; round < 300; ++round) {
        const int64_t rows = sizes.up_to(12), columns = 1 + sizes.up_to(30);
        own.random_delay();
        if (sizes.up_to(1)) {
          end_gather(transport, *start_gather(transport, rows, columns, round), rows, round);
        } else {
          scatter(transport, rows, columns, round, own);
        }
      }
    });
    EXPECT_THAT(errors, Each("")) << size << " ranks";
  }
}

TEST(ShmTransport, TwoOpenCollectivesFinishInAnyOrder) {
  const auto errors = run_ranks(3, [](ShmTransport& transport) {
    RandomSource own{std::mt19937(transport.rank())};
    for (int64_t round = 0; round < 200; round += 2) {
      const auto first = start_gather(transport, 3, 5, round), second = start_gather(transport, 4, 6, round + 1);
      own.random_delay();
      if (own.up_to(1)) {
        end_gather(transport, *first, 3, round);
        end_gather(transport, *second, 4, round + 1);
      } else {
        end_gather(transport, *second, 4, round + 1);
        end_gather(transport, *first, 3, round);
      }
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(ShmTransport, RejectsThirdOpenCollective) {
  const auto errors = run_ranks(1, [](ShmTransport& transport) {
    const auto first = start_gather(transport, 1, 1, 0), second = start_gather(transport, 1, 1, 1);
    start_gather(transport, 1, 1, 2);
  });
  EXPECT_THAT(errors[0], HasSubstr("two may be open"));
}

TEST(ShmTransport, SlotsGrowWhileOldBlocksAreRead) {
  const auto errors = run_ranks(3, [](ShmTransport& transport) {
    RandomSource own{std::mt19937(transport.rank())};
    int64_t rows = 8;
    for (int64_t round = 0; round < 8; round += 2, rows *= 4) {
      const auto small = start_gather(transport, rows, 100, round);
      own.random_delay();
      scatter(transport, 4 * rows, 100, round + 1, own);
      end_gather(transport, *small, rows, round);
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(ShmTransport, BlockIsWrittenInTheSlot) {
  const auto errors = run_ranks(2, [](ShmTransport& transport) {
    for (int64_t round = 0; round < 20; round += 2) {
      const auto collective = transport.all_gather(6, 7, at::kFloat);
      end_gather(transport, *start_gather(transport, 2, 2, round), 2, round);  // another collective in between
      fill(collective->outgoing(transport.rank()), transport.rank(), kAll, round + 1, 0, 6);
      collective->mark_ready(transport.rank(), 6);
      end_gather(transport, *collective, 6, round + 1);
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(ShmTransport, SendsStridedBlocksOfAnyDtype) {
  const auto errors = run_ranks(2, [](ShmTransport& transport) {
    for (const auto dtype : {at::kBFloat16, at::kDouble, at::kByte, at::kLong}) {
      const auto local = at::full({5, 4}, transport.rank() + 3, at::dtype(dtype)).t();
      const auto collective = transport.all_gather(local);
      const int peer = 1 - transport.rank();
      collective->wait(peer, 4);
      if (!at::equal(collective->incoming(peer), at::full({4, 5}, peer + 3, at::dtype(dtype))))
        C10_THROW_ERROR(Error, "wrong values");
      collective->finish();
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(ShmTransport, MismatchNamesBothFingerprintsOnEveryRank) {
  const auto run_mismatch = [](auto divergent_call) {
    return run_ranks(3, [&](ShmTransport& transport) {
      end_gather(transport, *start_gather(transport, 4, 6, 0), 4, 0);
      if (transport.rank() == 1) {
        divergent_call(transport)->finish();
      } else {
        end_gather(transport, *start_gather(transport, 4, 6, 1), 4, 1);
      }
    });
  };
  const auto mismatch_error = [](const char* remote) {
    return Each(
        AllOf(HasSubstr("Mismatch in collective 2"), HasSubstr("all_gather of [4, 6] float32"), HasSubstr(remote)));
  };
  EXPECT_THAT(run_mismatch([](ShmTransport& l) { return l.all_gather(at::empty({5, 6})); }),
              mismatch_error("[5, 6] float32"));
  EXPECT_THAT(run_mismatch([](ShmTransport& l) { return l.all_gather(at::empty({4, 7})); }),
              mismatch_error("[4, 7] float32"));
  EXPECT_THAT(run_mismatch([](ShmTransport& l) { return l.all_gather(at::empty({4, 6}, at::kHalf)); }),
              mismatch_error("[4, 6] float16"));
  EXPECT_THAT(run_mismatch([](ShmTransport& l) { return l.all_gather(at::empty({400000, 60})); }),
              mismatch_error("[400000, 60]"));
  EXPECT_THAT(run_mismatch([](ShmTransport& l) {
                auto collective = l.reduce_scatter(4, 6, at::kFloat);
                collective->mark_ready(0, 4);
                collective->mark_ready(2, 4);
                return collective;
              }),
              mismatch_error("reduce_scatter of [4, 6] float32"));
}

TEST(ShmTransport, ThrowingRankFailsPeersAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run_ranks(3, [](ShmTransport& transport) {
    const auto collective = transport.reduce_scatter(4, 6, at::kFloat);
    for (int to = 0; to < 3; ++to)
      if (to != transport.rank()) collective->mark_ready(to, 2);
    TORCH_CHECK(transport.rank() != 1, "an error of the caller");
    collective->wait(1, 4);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_THAT(errors[1], HasSubstr("an error of the caller"));
  for (const int rank : {0, 2})
    EXPECT_THAT(errors[rank], HasSubstr("Rank 1 abandoned collective 1 (reduce_scatter of [4, 6] float32)"));
}

TEST(ShmTransport, AbsentRankTimesOutByName) {
  const auto errors = run_ranks(
      3,
      [](ShmTransport& transport) {
        if (transport.rank() == 2) return;
        end_gather(transport, *start_gather(transport, 4, 6, 0), 4, 0);
      },
      milliseconds(300));
  EXPECT_EQ(errors[2], "");
  for (const int rank : {0, 1})
    EXPECT_THAT(errors[rank], AllOf(HasSubstr(" ms for rank 2"), HasSubstr("all_gather of [4, 6] float32")));
}

TEST(ShmTransport, ErrorIsSticky) {
  const auto errors = run_ranks(
      2,
      [](ShmTransport& transport) {
        if (transport.rank() == 1) std::this_thread::sleep_for(milliseconds(1000));
        const auto first = error_of([&] { end_gather(transport, *start_gather(transport, 1, 1, 0), 1, 0); });
        const auto second = error_of([&] { start_gather(transport, 1, 1, 1); });
        if (first.empty() || first != second) C10_THROW_ERROR(Error, "'" + first + "' and '" + second + "'");
      },
      milliseconds(100));
  EXPECT_THAT(errors, Each(""));
}

TEST(ShmTransport, RejectsInvalidArguments) {
  const auto errors = run_ranks(1, [](ShmTransport& transport) {
    EXPECT_THAT(error_of([&] { transport.all_gather(at::empty({3})); }),
                HasSubstr("expected a 2-D strided CPU tensor"));
    EXPECT_THAT(error_of([&] { transport.reduce_scatter(1LL << 40, 4, at::kFloat); }),
                HasSubstr("got [1099511627776, 4]"));
    EXPECT_THAT(error_of([&] { transport.reduce_scatter(1LL << 39, 1LL << 30, at::kFloat); }), HasSubstr("too large"));
    const auto collective = transport.all_gather(at::empty({3, 3}));
    EXPECT_THAT(error_of([&] { collective->incoming(0); }), HasSubstr("Rank 0 is not a peer of rank 0"));
    collective->finish();
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(ShmTransport, ChecksMemoryOfAllRanksTogether) {
  const auto rows =
      static_cast<int64_t>(comm::free_memory() / 10 * 3);  // two slots of this size fit for one rank, not for two
  const auto errors = run_ranks(2, [&](comm::ShmTransport& transport) { transport.all_gather(rows, 1, at::kByte); });
  EXPECT_THAT(errors, ::testing::Contains(HasSubstr("for each of 2 ranks")));
  EXPECT_THAT(errors, Each(HasSubstr("bytes of shared memory")));
}

}  // namespace
}  // namespace weft::testing
