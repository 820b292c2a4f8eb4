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

/// What rank `from` sends to rank `to` in round `round`: the values identify the block.
at::Tensor block(int round, int from, int to, int64_t rows, int64_t columns, at::ScalarType dtype) {
  const int64_t first = 100 * round + 10 * from + to;
  return at::arange(first, first + rows * columns, at::kLong).remainder(251).to(dtype).view({rows, columns});
}

class UcxTransport : public ::testing::Test {
 protected:
  void SetUp() override {
    ::setenv("WEFT_UCX_TRUSTED", "1", 1);
    if (!load_ucx().empty()) GTEST_SKIP() << load_ucx();
  }

  /// Runs `body(transport)` on one thread per rank and returns their errors.
  template <class Body>
  std::vector<std::string> on_ranks(int size, Body body, milliseconds timeout = milliseconds(10000)) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::string> errors(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          const auto transport = make_ucx_transport({store, rank, size, "tp", timeout});
          body(*transport);
        } catch (const c10::Error& error) {
          errors[rank] = error.what_without_backtrace();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    return errors;
  }
};

struct BlockShape {
  int64_t rows, columns;
  at::ScalarType dtype;
};

BlockShape random_shape(std::mt19937& random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  const at::ScalarType dtypes[] = {at::kFloat, at::kBFloat16, at::kDouble, at::kByte};
  return {below(4) == 0 ? below(3) : below(700), 1 + below(below(2) ? 8 : 1500), dtypes[below(4)]};
}

void gather(Transport& transport, int round, const BlockShape& s, std::mt19937& random) {
  const auto collective = transport.all_gather(block(round, transport.rank(), 0, s.rows, s.columns, s.dtype));
  for (int step = 0; step < transport.size(); ++step) {
    const int from = (transport.rank() + step) % transport.size();
    const auto some = s.rows ? static_cast<int64_t>(random() % s.rows) : 0;
    collective->wait(from, some);
    ASSERT_GE(collective->arrived(from), some);
    collective->progress();
    collective->wait(from, s.rows);
    ASSERT_TRUE(at::equal(collective->incoming(from), block(round, from, 0, s.rows, s.columns, s.dtype)))
        << "round " << round << ", from " << from;
  }
  collective->finish();
}

void scatter(Transport& transport, int round, const BlockShape& s, std::mt19937& random) {
  const auto collective = transport.reduce_scatter(s.rows, s.columns, s.dtype);
  std::vector<int64_t> done(transport.size());
  for (int left = transport.size(); left > 0;) {
    const int to = static_cast<int>(random() % transport.size());
    if (done[to] == s.rows && s.rows > 0) continue;
    const auto more = std::min<int64_t>(s.rows, done[to] + 1 + static_cast<int64_t>(random() % 200));
    const auto truth = block(round, transport.rank(), to, s.rows, s.columns, s.dtype);
    collective->outgoing(to).slice(0, done[to], more).copy_(truth.slice(0, done[to], more));
    collective->mark_ready(to, more);
    done[to] = more;
    left -= more == s.rows;
    collective->progress();
  }
  for (int from = 0; from < transport.size(); ++from) {
    collective->wait(from, s.rows);
    ASSERT_TRUE(at::equal(collective->incoming(from), block(round, from, transport.rank(), s.rows, s.columns, s.dtype)))
        << "round " << round << ", from " << from;
  }
  collective->finish();
}

TEST_F(UcxTransport, SendsBlocksOfAnySizeInAnyOrder) {
  for (const int size : {1, 2, 3, 4}) {
    const auto errors = on_ranks(size, [](Transport& transport) {
      std::mt19937 shapes(7), local(100 + transport.rank());  // all ranks use the same shapes, each its own order
      for (int round = 0; round < 30; ++round) {
        const auto shape = random_shape(shapes);
        if (shapes() % 2) {
          gather(transport, round, shape, local);
        } else {
          scatter(transport, round, shape, local);
        }
      }
    });
    for (const auto& error : errors) EXPECT_EQ(error, "") << size << " ranks";
  }
}

TEST_F(UcxTransport, KeepsTwoOpenCollectivesApart) {
  const auto errors = on_ranks(2, [](Transport& transport) {
    const int peer = 1 - transport.rank();
    for (int round = 0; round < 10; ++round) {
      const auto first = transport.all_gather(block(round, transport.rank(), 0, 300, 64, at::kFloat));
      const auto second = transport.reduce_scatter(200, 32, at::kFloat);
      EXPECT_THROW(transport.reduce_scatter(1, 1, at::kFloat), c10::Error);
      for (const int to : {0, 1}) {
        second->outgoing(to).copy_(block(round, transport.rank(), to, 200, 32, at::kFloat));
        second->mark_ready(to, 200);
      }
      second->wait(peer, 200);
      EXPECT_TRUE(at::equal(second->incoming(peer), block(round, peer, transport.rank(), 200, 32, at::kFloat)));
      second->finish();
      first->wait(peer, 300);
      EXPECT_TRUE(at::equal(first->incoming(peer), block(round, peer, 0, 300, 64, at::kFloat)));
      first->finish();
    }
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

TEST_F(UcxTransport, AcceptsStridedRows) {
  const auto errors = on_ranks(2, [](Transport& transport) {
    const int peer = 1 - transport.rank();
    const auto collective = transport.all_gather(block(0, transport.rank(), 0, 40, 64, at::kFloat).narrow(1, 8, 16));
    collective->wait(peer, 40);
    EXPECT_TRUE(at::equal(collective->incoming(peer), block(0, peer, 0, 40, 64, at::kFloat).narrow(1, 8, 16)));
    collective->finish();
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

TEST_F(UcxTransport, MismatchNamesBothFingerprintsOnEveryRank) {
  for (const int size : {2, 4}) {
    const auto errors = on_ranks(size, [](Transport& transport) {
      const auto collective = transport.all_gather(at::full({transport.rank() == 1 ? 12 : 8, 16}, 1, at::kFloat));
      collective->finish();
    });
    for (const auto& error : errors)
      EXPECT_THAT(error, AllOf(HasSubstr("[8, 16]"), HasSubstr("[12, 16]"))) << size << " ranks";
  }
  const auto errors = on_ranks(2, [](Transport& transport) {
    auto collective = transport.rank() == 0 ? transport.all_gather(at::full({8, 16}, 1, at::kFloat))
                                            : transport.reduce_scatter(8, 16, at::kFloat);
    collective->wait(1 - transport.rank(), 8);
  });
  EXPECT_THAT(errors, ::testing::Each(AllOf(HasSubstr("all_gather of"), HasSubstr("reduce_scatter of"))));
}

TEST_F(UcxTransport, AbsentRankTimesOutByName) {
  std::latch done(1);
  const auto errors = on_ranks(
      2,
      [&](Transport& transport) {
        if (transport.rank() == 1) return done.wait();  // connected, but runs no collective
        const auto start = Clock::now();
        try {
          transport.all_gather(at::full({8, 16}, 1, at::kFloat))->wait(1, 8);
        } catch (...) {
          EXPECT_GE(Clock::now() - start, milliseconds(500));
          EXPECT_LT(Clock::now() - start, milliseconds(1500));
          EXPECT_THROW(transport.reduce_scatter(1, 1, at::kFloat), c10::Error);  // the group has failed
          done.count_down();
          throw;
        }
      },
      milliseconds(500));
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 1"), HasSubstr("all_gather"), HasSubstr("500 ms")));
}

TEST_F(UcxTransport, DisconnectedRankIsNoticedAtOnce) {
  const auto start = Clock::now();
  const auto errors = on_ranks(3, [&](Transport& transport) {
    gather(transport, 0, {100, 100, at::kFloat}, *std::make_unique<std::mt19937>(1));
    if (transport.rank() == 2) return;  // destroys its transport
    transport.all_gather(at::full({8, 16}, 1, at::kFloat))->finish();
  });
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
  for (const int rank : {0, 1}) EXPECT_THAT(errors[rank], HasSubstr("rank 2"));
}

TEST_F(UcxTransport, UnfinishedCollectiveFailsEveryRank) {
  const auto start = Clock::now();
  const auto errors = on_ranks(2, [&](Transport& transport) {
    const auto collective = transport.reduce_scatter(64, 64, at::kFloat);
    if (transport.rank() == 1) return;  // destroys the unfinished collective
    collective->mark_ready(0, 64);
    collective->mark_ready(1, 64);
    collective->finish();
  });
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
  EXPECT_THAT(errors[0], HasSubstr("Rank 1 abandoned collective 1 (reduce_scatter"));
}

TEST_F(UcxTransport, MissingRankIsNamedAtCreation) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  try {
    make_ucx_transport({store, 0, 2, "tp", milliseconds(300)});
    FAIL() << "created a transport without rank 1";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1"), HasSubstr("300 ms")));
  }
}

TEST_F(UcxTransport, CanBeRecreatedOverTheSameStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        const auto transport = make_ucx_transport({store, rank, 2, "tp", milliseconds(5000)});
        std::mt19937 random(1);
        gather(*transport, round, {10, 10, at::kFloat}, random);
      });
    }
    for (auto& rank : ranks) rank.join();
  }
}

TEST_F(UcxTransport, RejectsInvalidBlocks) {
  const auto errors = on_ranks(1, [](Transport& transport) {
    EXPECT_THROW(transport.all_gather(at::full({4}, 1)), c10::ValueError);
    const auto collective = transport.reduce_scatter(4, 4, at::kFloat);
    collective->mark_ready(0, 2);
    EXPECT_THROW(collective->mark_ready(0, 1), c10::ValueError);
    EXPECT_THROW(collective->mark_ready(0, 5), c10::ValueError);
    EXPECT_THROW(collective->outgoing(1), c10::IndexError);
    collective->finish();
  });
  EXPECT_EQ(errors[0], "");
}

TEST_F(UcxTransport, TimeoutNamesMissingRankNotWaitingOne) {
  std::latch done(3);
  const auto errors = on_ranks(
      4,
      [&](Transport& transport) {
        if (transport.rank() == 3) return done.wait();  // connected, but runs no collective
        // Rank 0, which waits for rank 1, times out first.
        std::this_thread::sleep_for(milliseconds(100 * transport.rank()));
        const auto collective = transport.reduce_scatter(8, 16, at::kFloat);
        try {
          collective->wait(transport.rank() + 1, 8);
        } catch (...) {
          done.count_down();
          throw;
        }
      },
      milliseconds(600));
  for (const int rank : {0, 1, 2}) EXPECT_THAT(errors[rank], AllOf(HasSubstr("for rank 3"), HasSubstr("600 ms")));
}

/// UCX patches munmap if it tracks memory mappings, as RDMA requires.
std::string first_bytes_of_munmap() { return {static_cast<const char*>(::dlsym(RTLD_NEXT, "munmap")), 16}; }

TEST_F(UcxTransport, LeavesSignalHandlersAndLibcUnchanged) {
  const auto bytes = first_bytes_of_munmap();
  const auto errors =
      on_ranks(2, [](Transport& transport) { transport.all_gather(at::full({8, 16}, 1, at::kFloat))->finish(); });
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
