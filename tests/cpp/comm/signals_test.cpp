#include "weft/comm/signals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/cpp/comm/thread_transports.h"

namespace weft::testing {
namespace {

using comm::CollectiveFingerprint;
using comm::CommOp;
using comm::Signals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

/// Control blocks and two data slots per rank, all in this process.
struct Ranks {
  explicit Ranks(int size, milliseconds time = milliseconds(20000)) : slots(size), timeout(time) {
    for (int r = 0; r < size; ++r)
      control_blocks.push_back(comm::SharedMemory::make(Signals::control_block_bytes(size)));
  }
  Signals signals(int rank) const {
    Signals::Options options{rank, {}, 77, timeout};
    for (const auto& control_block : control_blocks) options.peers.push_back({control_block->data(), &no_process});
    return Signals(options);
  }
  int size() const { return static_cast<int>(control_blocks.size()); }

  comm::SharedMemories control_blocks;
  std::vector<std::array<int64_t, 2>> slots;  // value of a rank, by parity of the sequence number
  milliseconds timeout;
  comm::Process no_process;
};

constexpr CollectiveFingerprint kGather{CommOp::all_gather, at::kLong, 1, 1};

/// In each round every rank writes a number that all others read; some ranks are late at random.
void run_counter_rounds(Ranks& ranks, int rank, int64_t rounds) {
  auto signals = ranks.signals(rank);
  std::mt19937 random(rank);
  for (int64_t n = 1; n <= rounds; ++n) {
    const auto seq = signals.start(kGather);
    ranks.slots[rank][seq % 2] = 1000 * n + rank;
    signals.mark_ready(seq, rank, 1);
    if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 50));
    for (int peer = 0; peer < ranks.size(); ++peer) {
      signals.wait(seq, peer, /*broadcast=*/true, 1);
      TORCH_CHECK(ranks.slots[peer][seq % 2] == 1000 * n + peer, "round ", n, " of rank ", peer);
    }
    signals.finish(seq);
  }
}

TEST(Signals, TenThousandCollectivesNeedNoBarrier) {
  for (const int size : {2, 3, 4}) {
    Ranks ranks(size);
    EXPECT_THAT(run_threads(size, [&](int rank) { run_counter_rounds(ranks, rank, 10000); }), Each(""))
        << size << " ranks";
  }
}

TEST(Signals, RankMayBeOneCollectiveAhead) {
  Ranks ranks(2, milliseconds(50));
  auto ahead = ranks.signals(0);
  for (int i = 0; i < 2; ++i) ahead.finish(ahead.start(kGather));
  EXPECT_THAT(error_of([&] { ahead.start(kGather); }),
              AllOf(HasSubstr("for rank 1"), HasSubstr("to finish collective 1")));
}

TEST(Signals, GarbageIsProtocolError) {
  Ranks ranks(2, milliseconds(500));
  auto signals = ranks.signals(0);
  const auto seq = signals.start(kGather);
  std::memset(ranks.control_blocks[1]->data() + 0, 0xff, ranks.control_blocks[1]->bytes());
  EXPECT_THAT(error_of([&] { signals.wait(seq, 1, true, 1); }), HasSubstr("Protocol error"));
}

TEST(Signals, ExcessRowsAreProtocolError) {
  Ranks ranks(2, milliseconds(500));
  auto signals = ranks.signals(0), peer = ranks.signals(1);
  const auto seq = signals.start(kGather);
  peer.mark_ready(peer.start(kGather), 1, 5);
  EXPECT_THAT(error_of([&] { signals.arrived(seq, 1, true); }), HasSubstr("Protocol error"));
}

TEST(Signals, WrongGroupIdIsProtocolError) {
  Ranks ranks(2, milliseconds(500));
  auto signals = ranks.signals(0);
  Signals::Options other{1, {}, 78, milliseconds(500)};
  for (const auto& control_block : ranks.control_blocks)
    other.peers.push_back({control_block->data(), &ranks.no_process});
  Signals intruder(other);
  const auto seq = signals.start(kGather);
  intruder.start(kGather);
  EXPECT_THAT(error_of([&] { signals.wait_for_match(seq, 1); }), HasSubstr("Protocol error"));
}

TEST(Signals, FirstFailureReachesEveryRank) {
  Ranks ranks(3, milliseconds(100));
  const auto errors = run_threads(3, [&](int rank) {
    auto signals = ranks.signals(rank);
    const auto seq = signals.start(rank == 2 ? CollectiveFingerprint{CommOp::all_gather, at::kHalf, 1, 1} : kGather);
    signals.wait_for_match(seq, 2);
    signals.wait_for_match(seq, 0);
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("all_gather of [1, 1] int64"), HasSubstr("all_gather of [1, 1] float16"))));
  EXPECT_THAT(error_of([&] { ranks.signals(1).check(); }), ::testing::AnyOf(errors[0], errors[1], errors[2]));
}

TEST(Signals, TimeoutNamesMissingRankNotWaitingOne) {
  Ranks ranks(4, milliseconds(1500));  // rank 3 does not take part; a busy machine may delay the others
  const auto errors = run_threads(3, [&](int rank) {
    std::this_thread::sleep_for(milliseconds(100 * rank));  // rank 0, which waits for a waiting rank, times out first
    auto signals = ranks.signals(rank);
    const auto seq = signals.start(kGather);
    signals.wait(seq, rank + 1, /*broadcast=*/true, 1);
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("for rank 3"), HasSubstr("Rank 2 waited"))));
}

TEST(Signals, MutualWaitTimesOut) {
  Ranks ranks(2, milliseconds(200));
  const auto errors = run_threads(2, [&](int rank) {
    auto signals = ranks.signals(rank);
    signals.wait(signals.start(kGather), 1 - rank, /*broadcast=*/true, 1);
  });
  EXPECT_THAT(errors, Each(HasSubstr("waited")));
}

TEST(Signals, MinFreeMemoryIsOverAllRanks) {
  Ranks ranks(3);
  const auto errors = run_threads(3, [&](int rank) {
    auto signals = ranks.signals(rank);
    const auto seq = signals.start(kGather, 100 + (rank + 1) % 3);
    TORCH_CHECK(signals.min_free_memory(seq) == 100, "wrong");
    signals.finish(seq);
  });
  EXPECT_THAT(errors, Each(""));
}

}  // namespace
}  // namespace weft::testing
