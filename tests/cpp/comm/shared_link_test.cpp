#include "weft/comm/shared_link.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/cpp/comm/thread_links.h"
#include "weft/comm/free_memory.h"

namespace weft::testing {
namespace {

using comm::Exchange;
using comm::SharedLink;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

/// What rank `from` writes for rank `to` in round `round`: every value says where it belongs.
float value(int from, int to, int64_t round, int64_t i) {
  return static_cast<float>(from * 100 + to * 10) + static_cast<float>((round * 7 + i) % 1000) * 1000;
}

/// Plain loops, so that the thread sanitizer sees them.
void fill(const at::Tensor& block, int from, int to, int64_t round, int64_t begin, int64_t end) {
  auto* data = block.data_ptr<float>();
  for (int64_t i = begin * block.size(1); i < end * block.size(1); ++i) data[i] = value(from, to, round, i);
}

void expect_filled(const at::Tensor& block, int from, int to, int64_t round) {
  const auto* data = block.const_data_ptr<float>();
  for (int64_t i = 0; i < block.numel(); ++i)
    if (data[i] != value(from, to, round, i)) C10_THROW_ERROR(Error, c10::str("round ", round, " of rank ", from));
}

struct Dice {
  std::mt19937 random;
  int64_t up_to(int64_t n) { return static_cast<int64_t>(random() % (n + 1)); }
  void dawdle() {
    if (up_to(3) == 0) std::this_thread::sleep_for(std::chrono::microseconds(up_to(200)));
  }
};

constexpr int kAll = 9;  // `to` of a block for everybody

std::unique_ptr<Exchange> start_gather(SharedLink& link, int64_t rows, int64_t columns, int64_t round) {
  auto mine = at::empty({rows, columns});
  fill(mine, link.rank(), kAll, round, 0, rows);
  return link.all_gather(mine);
}

void end_gather(SharedLink& link, Exchange& exchange, int64_t rows, int64_t round) {
  for (int step = 1; step < link.size(); ++step) {
    const int from = (link.rank() + step) % link.size();
    exchange.wait(from, rows);
    expect_filled(exchange.incoming(from), from, kAll, round);
  }
  exchange.finish();
}

void scatter(SharedLink& link, int64_t rows, int64_t columns, int64_t round, Dice& dice) {
  const auto exchange = link.reduce_scatter(rows, columns, at::kFloat);
  for (int step = 1; step < link.size(); ++step) {
    const int to = (link.rank() + step) % link.size();
    const auto block = exchange->outgoing(to);
    for (int64_t from = 0; from < rows;) {
      const int64_t end = std::min(rows, from + 1 + dice.up_to(rows));
      fill(block, link.rank(), to, round, from, end);
      exchange->publish(to, end);
      from = end;
    }
  }
  for (int step = 1; step < link.size(); ++step) {
    const int from = (link.rank() + step) % link.size();
    exchange->wait(from, rows);
    expect_filled(exchange->incoming(from), from, link.rank(), round);
    dice.dawdle();
  }
  exchange->finish();
}

TEST(SharedLink, EveryRankReadsWhatTheOthersWroteInEveryRound) {
  for (const int size : {1, 2, 3, 4}) {
    const auto errors = run_ranks(size, [](SharedLink& link) {
      Dice sizes{std::mt19937(5)}, own{std::mt19937(link.rank())};  // sizes are the same on all ranks
      for (int64_t round = 0; round < 300; ++round) {
        const int64_t rows = sizes.up_to(12), columns = 1 + sizes.up_to(30);
        own.dawdle();
        if (sizes.up_to(1)) {
          end_gather(link, *start_gather(link, rows, columns, round), rows, round);
        } else {
          scatter(link, rows, columns, round, own);
        }
      }
    });
    EXPECT_THAT(errors, Each("")) << size << " ranks";
  }
}

TEST(SharedLink, TwoRoundsMayBeOpenAndEndInAnyOrder) {
  const auto errors = run_ranks(3, [](SharedLink& link) {
    Dice own{std::mt19937(link.rank())};
    for (int64_t round = 0; round < 200; round += 2) {
      const auto first = start_gather(link, 3, 5, round), second = start_gather(link, 4, 6, round + 1);
      own.dawdle();
      if (own.up_to(1)) {
        end_gather(link, *first, 3, round);
        end_gather(link, *second, 4, round + 1);
      } else {
        end_gather(link, *second, 4, round + 1);
        end_gather(link, *first, 3, round);
      }
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(SharedLink, AThirdOpenRoundIsRefused) {
  const auto errors = run_ranks(1, [](SharedLink& link) {
    const auto first = start_gather(link, 1, 1, 0), second = start_gather(link, 1, 1, 1);
    start_gather(link, 1, 1, 2);
  });
  EXPECT_THAT(errors[0], HasSubstr("two may be open"));
}

TEST(SharedLink, MemoryGrowsWhileABlockOfTheOldOneIsStillRead) {
  const auto errors = run_ranks(3, [](SharedLink& link) {
    Dice own{std::mt19937(link.rank())};
    int64_t rows = 8;
    for (int64_t round = 0; round < 8; round += 2, rows *= 4) {
      const auto small = start_gather(link, rows, 100, round);
      own.dawdle();
      scatter(link, 4 * rows, 100, round + 1, own);
      end_gather(link, *small, rows, round);
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(SharedLink, ABlockWrittenInPlaceIsNotCopied) {
  const auto errors = run_ranks(2, [](SharedLink& link) {
    for (int64_t round = 0; round < 20; round += 2) {
      const auto mine = link.place(6, 7, at::kFloat);
      end_gather(link, *start_gather(link, 2, 2, round), 2, round);  // another round may come between
      fill(mine, link.rank(), kAll, round + 1, 0, 6);
      const auto exchange = link.all_gather(mine);
      end_gather(link, *exchange, 6, round + 1);
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(SharedLink, AStridedBlockOfAnyDtypeArrivesAsItIs) {
  const auto errors = run_ranks(2, [](SharedLink& link) {
    for (const auto dtype : {at::kBFloat16, at::kDouble, at::kByte, at::kLong}) {
      const auto mine = at::full({5, 4}, link.rank() + 3, at::dtype(dtype)).t();
      const auto exchange = link.all_gather(mine);
      const int peer = 1 - link.rank();
      exchange->wait(peer, 4);
      if (!at::equal(exchange->incoming(peer), at::full({4, 5}, peer + 3, at::dtype(dtype))))
        C10_THROW_ERROR(Error, "wrong values");
      exchange->finish();
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(SharedLink, RanksThatDisagreeAllRaiseWithBothSides) {
  const auto disagree = [](auto odd_one) {
    return run_ranks(3, [&](SharedLink& link) {
      end_gather(link, *start_gather(link, 4, 6, 0), 4, 0);
      if (link.rank() == 1) {
        odd_one(link)->finish();
      } else {
        end_gather(link, *start_gather(link, 4, 6, 1), 4, 1);
      }
    });
  };
  const auto told = [](const char* theirs) {
    return Each(AllOf(HasSubstr("disagree in round 2"), HasSubstr("all_gather of [4, 6] Float"), HasSubstr(theirs)));
  };
  EXPECT_THAT(disagree([](SharedLink& l) { return l.all_gather(at::empty({5, 6})); }), told("[5, 6] Float"));
  EXPECT_THAT(disagree([](SharedLink& l) { return l.all_gather(at::empty({4, 7})); }), told("[4, 7] Float"));
  EXPECT_THAT(disagree([](SharedLink& l) { return l.all_gather(at::empty({4, 6}, at::kHalf)); }), told("[4, 6] Half"));
  EXPECT_THAT(disagree([](SharedLink& l) { return l.all_gather(at::empty({400000, 60})); }), told("[400000, 60]"));
  EXPECT_THAT(disagree([](SharedLink& l) {
                auto exchange = l.reduce_scatter(4, 6, at::kFloat);
                exchange->publish(0, 4);
                exchange->publish(2, 4);
                return exchange;
              }),
              told("reduce_scatter of [4, 6] Float"));
}

TEST(SharedLink, ARankThatThrowsIsNoticedAtOnceByAll) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run_ranks(3, [](SharedLink& link) {
    const auto exchange = link.reduce_scatter(4, 6, at::kFloat);
    for (int to = 0; to < 3; ++to)
      if (to != link.rank()) exchange->publish(to, 2);
    TORCH_CHECK(link.rank() != 1, "an error of the caller");
    exchange->wait(1, 4);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_THAT(errors[1], HasSubstr("an error of the caller"));
  for (const int rank : {0, 2})
    EXPECT_THAT(errors[rank],
                AllOf(HasSubstr("Rank 1 gave up in round 1"), HasSubstr("reduce_scatter of [4, 6] Float")));
}

TEST(SharedLink, ARankThatStaysAwayIsNamedAtTheTimeout) {
  const auto errors = run_ranks(
      3,
      [](SharedLink& link) {
        if (link.rank() == 2) return;
        end_gather(link, *start_gather(link, 4, 6, 0), 4, 0);
      },
      milliseconds(300));
  EXPECT_EQ(errors[2], "");
  for (const int rank : {0, 1})
    EXPECT_THAT(errors[rank], AllOf(HasSubstr(" ms for rank 2"), HasSubstr("all_gather of [4, 6] Float")));
}

TEST(SharedLink, AfterAFailureTheLinkRefusesFurtherUse) {
  const auto errors = run_ranks(
      2,
      [](SharedLink& link) {
        if (link.rank() == 1) std::this_thread::sleep_for(milliseconds(400));
        const auto first = error_of([&] { end_gather(link, *start_gather(link, 1, 1, 0), 1, 0); });
        const auto second = error_of([&] { start_gather(link, 1, 1, 1); });
        if (first.empty() || first != second) C10_THROW_ERROR(Error, "'" + first + "' and '" + second + "'");
      },
      milliseconds(100));
  EXPECT_THAT(errors, Each(""));
}

TEST(SharedLink, WrongUseIsToldByName) {
  const auto errors = run_ranks(1, [](SharedLink& link) {
    EXPECT_THAT(error_of([&] { link.all_gather(at::empty({3})); }), HasSubstr("expected a dense matrix"));
    EXPECT_THAT(error_of([&] { link.reduce_scatter(1LL << 40, 4, at::kFloat); }), HasSubstr("was given"));
    EXPECT_THAT(error_of([&] { link.reduce_scatter(1LL << 39, 1LL << 30, at::kFloat); }), HasSubstr("too large"));
    const auto exchange = link.all_gather(at::empty({3, 3}));
    EXPECT_THAT(error_of([&] { exchange->incoming(0); }), HasSubstr("Rank 0 is no peer of rank 0"));
    exchange->finish();
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(SharedLink, MemoryIsCheckedForAllRanksTogether) {
  const auto rows = static_cast<int64_t>(comm::free_memory() / 10 * 3);  // two slots of it: one rank could take them
  const auto errors = run_ranks(2, [&](comm::SharedLink& link) { link.all_gather(rows, 1, at::kByte); });
  EXPECT_THAT(errors, ::testing::Contains(HasSubstr("for each of 2 ranks")));
  EXPECT_THAT(errors, Each(HasSubstr("bytes of shared memory")));
}

}  // namespace
}  // namespace weft::testing
