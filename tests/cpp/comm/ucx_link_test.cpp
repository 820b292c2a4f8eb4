#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <latch>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "weft/comm/ucx_plugin.h"

namespace weft::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

/// What rank `from` sends to rank `to` in round `round`: every element tells where it belongs.
at::Tensor block(int round, int from, int to, int64_t rows, int64_t columns, at::ScalarType dtype) {
  const int64_t first = 100 * round + 10 * from + to;
  return at::arange(first, first + rows * columns, at::kLong).remainder(251).to(dtype).view({rows, columns});
}

class UcxLink : public ::testing::Test {
 protected:
  void SetUp() override {
    ::setenv("WEFT_UCX_TRUSTED", "1", 1);
    if (!load_ucx().empty()) GTEST_SKIP() << load_ucx();
  }

  /// Runs `body(link)` on a thread for each rank; returns what each of them raised.
  template <class Body>
  std::vector<std::string> on_ranks(int size, Body body, milliseconds timeout = milliseconds(10000)) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::string> errors(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          const auto link = make_ucx_link({store, rank, size, "tp", timeout});
          body(*link);
        } catch (const c10::Error& error) {
          errors[rank] = error.what_without_backtrace();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    return errors;
  }
};

struct Shape {
  int64_t rows, columns;
  at::ScalarType dtype;
};

Shape random_shape(std::mt19937& random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  const at::ScalarType dtypes[] = {at::kFloat, at::kBFloat16, at::kDouble, at::kByte};
  return {below(4) == 0 ? below(3) : below(700), 1 + below(below(2) ? 8 : 1500), dtypes[below(4)]};
}

void gather(Link& link, int round, const Shape& s, std::mt19937& random) {
  const auto exchange = link.all_gather(block(round, link.rank(), 0, s.rows, s.columns, s.dtype));
  for (int step = 0; step < link.size(); ++step) {
    const int from = (link.rank() + step) % link.size();
    const auto some = s.rows ? static_cast<int64_t>(random() % s.rows) : 0;
    exchange->wait(from, some);
    ASSERT_GE(exchange->arrived(from), some);
    exchange->advance();
    exchange->wait(from, s.rows);
    ASSERT_TRUE(at::equal(exchange->incoming(from), block(round, from, 0, s.rows, s.columns, s.dtype)))
        << "round " << round << ", from " << from;
  }
  exchange->finish();
}

void scatter(Link& link, int round, const Shape& s, std::mt19937& random) {
  const auto exchange = link.reduce_scatter(s.rows, s.columns, s.dtype);
  std::vector<int64_t> done(link.size());
  for (int left = link.size(); left > 0;) {
    const int to = static_cast<int>(random() % link.size());
    if (done[to] == s.rows && s.rows > 0) continue;
    const auto more = std::min<int64_t>(s.rows, done[to] + 1 + static_cast<int64_t>(random() % 200));
    const auto truth = block(round, link.rank(), to, s.rows, s.columns, s.dtype);
    exchange->outgoing(to).slice(0, done[to], more).copy_(truth.slice(0, done[to], more));
    exchange->publish(to, more);
    done[to] = more;
    left -= more == s.rows;
    exchange->advance();
  }
  for (int from = 0; from < link.size(); ++from) {
    exchange->wait(from, s.rows);
    ASSERT_TRUE(at::equal(exchange->incoming(from), block(round, from, link.rank(), s.rows, s.columns, s.dtype)))
        << "round " << round << ", from " << from;
  }
  exchange->finish();
}

TEST_F(UcxLink, CarriesBlocksOfAnySizeInAnyPublishingPattern) {
  for (const int size : {1, 2, 3, 4}) {
    const auto errors = on_ranks(size, [](Link& link) {
      std::mt19937 shapes(7), mine(100 + link.rank());  // shapes are the same on every rank, patterns are not
      for (int round = 0; round < 30; ++round) {
        const auto shape = random_shape(shapes);
        if (shapes() % 2) {
          gather(link, round, shape, mine);
        } else {
          scatter(link, round, shape, mine);
        }
      }
    });
    for (const auto& error : errors) EXPECT_EQ(error, "") << size << " ranks";
  }
}

TEST_F(UcxLink, KeepsTwoRoundsApart) {
  const auto errors = on_ranks(2, [](Link& link) {
    const int peer = 1 - link.rank();
    for (int round = 0; round < 10; ++round) {
      const auto first = link.all_gather(block(round, link.rank(), 0, 300, 64, at::kFloat));
      const auto second = link.reduce_scatter(200, 32, at::kFloat);
      EXPECT_THROW(link.reduce_scatter(1, 1, at::kFloat), c10::Error);
      for (const int to : {0, 1}) {
        second->outgoing(to).copy_(block(round, link.rank(), to, 200, 32, at::kFloat));
        second->publish(to, 200);
      }
      second->wait(peer, 200);
      EXPECT_TRUE(at::equal(second->incoming(peer), block(round, peer, link.rank(), 200, 32, at::kFloat)));
      second->finish();
      first->wait(peer, 300);
      EXPECT_TRUE(at::equal(first->incoming(peer), block(round, peer, 0, 300, 64, at::kFloat)));
      first->finish();
    }
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

TEST_F(UcxLink, TakesBlocksWithGapsBetweenTheirRows) {
  const auto errors = on_ranks(2, [](Link& link) {
    const int peer = 1 - link.rank();
    const auto exchange = link.all_gather(block(0, link.rank(), 0, 40, 64, at::kFloat).narrow(1, 8, 16));
    exchange->wait(peer, 40);
    EXPECT_TRUE(at::equal(exchange->incoming(peer), block(0, peer, 0, 40, 64, at::kFloat).narrow(1, 8, 16)));
    exchange->finish();
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

TEST_F(UcxLink, ADisagreementIsAnErrorWithBothValuesOnEveryRank) {
  for (const int size : {2, 4}) {
    const auto errors = on_ranks(size, [](Link& link) {
      const auto exchange = link.all_gather(at::full({link.rank() == 1 ? 12 : 8, 16}, 1, at::kFloat));
      exchange->finish();
    });
    for (const auto& error : errors)
      EXPECT_THAT(error, AllOf(HasSubstr("[8, 16]"), HasSubstr("[12, 16]"))) << size << " ranks";
  }
  const auto errors = on_ranks(2, [](Link& link) {
    auto exchange =
        link.rank() == 0 ? link.all_gather(at::full({8, 16}, 1, at::kFloat)) : link.reduce_scatter(8, 16, at::kFloat);
    exchange->wait(1 - link.rank(), 8);
  });
  EXPECT_THAT(errors, ::testing::Each(AllOf(HasSubstr("all_gather of"), HasSubstr("reduce_scatter of"))));
}

TEST_F(UcxLink, AnAbsentRankIsNamedAtTheTimeout) {
  std::latch over(1);
  const auto errors = on_ranks(
      2,
      [&](Link& link) {
        if (link.rank() == 1) return over.wait();  // is there, takes part in nothing
        const auto start = Clock::now();
        try {
          link.all_gather(at::full({8, 16}, 1, at::kFloat))->wait(1, 8);
        } catch (...) {
          EXPECT_GE(Clock::now() - start, milliseconds(500));
          EXPECT_LT(Clock::now() - start, milliseconds(1500));
          EXPECT_THROW(link.reduce_scatter(1, 1, at::kFloat), c10::Error);  // and the group is no longer usable
          over.count_down();
          throw;
        }
      },
      milliseconds(500));
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 1"), HasSubstr("all_gather"), HasSubstr("500 ms")));
}

TEST_F(UcxLink, ARankThatLeavesIsNoticedAtOnce) {
  const auto start = Clock::now();
  const auto errors = on_ranks(3, [&](Link& link) {
    gather(link, 0, {100, 100, at::kFloat}, *std::make_unique<std::mt19937>(1));
    if (link.rank() == 2) return;  // destroys its link
    link.all_gather(at::full({8, 16}, 1, at::kFloat))->finish();
  });
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
  for (const int rank : {0, 1}) EXPECT_THAT(errors[rank], HasSubstr("rank 2"));
}

TEST_F(UcxLink, AnExchangeThatIsNotFinishedEndsTheGroupEverywhere) {
  const auto start = Clock::now();
  const auto errors = on_ranks(2, [&](Link& link) {
    const auto exchange = link.reduce_scatter(64, 64, at::kFloat);
    if (link.rank() == 1) return;  // an exception on its way, say
    exchange->publish(0, 64);
    exchange->publish(1, 64);
    exchange->finish();
  });
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
  EXPECT_THAT(errors[0], AllOf(HasSubstr("Rank 1 gave up"), HasSubstr("reduce_scatter")));
}

TEST_F(UcxLink, AMissingRankIsNamedWhenTheLinkIsMade) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  try {
    make_ucx_link({store, 0, 2, "tp", milliseconds(300)});
    FAIL() << "made a link without rank 1";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1"), HasSubstr("300 ms")));
  }
}

TEST_F(UcxLink, ALinkCanBeMadeAgainOverTheSameStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        const auto link = make_ucx_link({store, rank, 2, "tp", milliseconds(5000)});
        std::mt19937 random(1);
        gather(*link, round, {10, 10, at::kFloat}, random);
      });
    }
    for (auto& rank : ranks) rank.join();
  }
}

TEST_F(UcxLink, RefusesWhatItCannotSend) {
  const auto errors = on_ranks(1, [](Link& link) {
    EXPECT_THROW(link.all_gather(at::full({4}, 1)), c10::ValueError);
    const auto exchange = link.reduce_scatter(4, 4, at::kFloat);
    exchange->publish(0, 2);
    EXPECT_THROW(exchange->publish(0, 1), c10::ValueError);
    EXPECT_THROW(exchange->publish(0, 5), c10::ValueError);
    EXPECT_THROW(exchange->outgoing(1), c10::IndexError);
    exchange->finish();
  });
  EXPECT_EQ(errors[0], "");
}

TEST_F(UcxLink, TimeoutNamesTheRankThatIsGoneNotOneThatWaitsForIt) {
  std::latch over(3);
  const auto errors = on_ranks(
      4,
      [&](Link& link) {
        if (link.rank() == 3) return over.wait();                      // is there, takes part in nothing
        std::this_thread::sleep_for(milliseconds(100 * link.rank()));  // so rank 0 times out first, waiting for rank 1
        const auto exchange = link.reduce_scatter(8, 16, at::kFloat);
        try {
          exchange->wait(link.rank() + 1, 8);
        } catch (...) {
          over.count_down();
          throw;
        }
      },
      milliseconds(600));
  for (const int rank : {0, 1, 2}) EXPECT_THAT(errors[rank], AllOf(HasSubstr("for rank 3"), HasSubstr("600 ms")));
}

/// The beginning of a function that UCX patches where it has to see memory come and go, as RDMA needs it.
std::string first_bytes_of_munmap() { return {static_cast<const char*>(::dlsym(RTLD_NEXT, "munmap")), 16}; }

TEST_F(UcxLink, LeavesSignalHandlersAndTheCLibraryAsTheyWere) {
  const auto bytes = first_bytes_of_munmap();
  const auto errors = on_ranks(2, [](Link& link) { link.all_gather(at::full({8, 16}, 1, at::kFloat))->finish(); });
  EXPECT_THAT(errors, ::testing::Each(""));
  EXPECT_EQ(first_bytes_of_munmap(), bytes);
  for (const int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) {
    struct sigaction handler = {};
    ASSERT_EQ(::sigaction(number, nullptr, &handler), 0);
    Dl_info owner{};
    const bool known = ::dladdr(reinterpret_cast<void*>(handler.sa_handler), &owner) != 0;
    EXPECT_FALSE(known && std::string_view(owner.dli_fname).find("libucs") != std::string_view::npos) << number;
  }
  EXPECT_EQ(std::getenv("UCX_HANDLE_ERRORS"), nullptr);
}

}  // namespace
}  // namespace weft::comm
