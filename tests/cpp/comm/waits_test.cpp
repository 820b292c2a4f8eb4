// Every wait ends when the program is interrupted, or when a Store does not respond.
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/cpp/comm/thread_transports.h"
#include "tests/cpp/thread_ranks.h"
#include "weft/comm/group.h"
#include "weft/comm/host_rendezvous.h"
#include "weft/comm/interrupt.h"
#include "weft/comm/run_with_deadline.h"
#include "weft/comm/store_exchange.h"
#include "weft/comm/transports.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

/// Stands for the exception of the Python binding: not a c10::Error.
struct Interrupt : std::exception {
  const char* what() const noexcept override { return "interrupt"; }
};

std::atomic<bool> interrupted = false;

class Interrupts : public ::testing::Test {
 protected:
  void SetUp() override {
    interrupted = false;
    comm::set_interrupt_check([] {
      if (interrupted) throw Interrupt();
    });
  }
  void TearDown() override { comm::set_interrupt_check(nullptr); }

  /// Interrupts `wait` and expects it to raise Interrupt within a second.
  static void expect_ended(const std::function<void()>& wait) {
    auto raised = std::async(std::launch::async, [&] {
      try {
        wait();
      } catch (const Interrupt&) {
        return std::string("interrupt");
      } catch (const std::exception& error) {
        return std::string(error.what());
      }
      return std::string("nothing");
    });
    std::this_thread::sleep_for(milliseconds(200));
    EXPECT_NE(raised.wait_for(milliseconds(0)), std::future_status::ready);
    interrupted = true;
    const auto start = Clock::now();
    EXPECT_EQ(raised.get(), "interrupt");
    EXPECT_LT(Clock::now() - start, milliseconds(1000));
  }
};

TEST_F(Interrupts, EndCollectiveAndFailGroup) {
  const ThreadRanks ranks(2, milliseconds(10000));
  expect_ended([&] { comm::Group(ranks.name(0)).all_gather(at::full({2}, 1.0)).wait(); });
  interrupted = false;
  EXPECT_THAT(error_of([&] { comm::Group(ranks.name(0)).all_gather(at::full({2}, 1.0)).wait(); }),
              HasSubstr("was interrupted"));
}

TEST_F(Interrupts, EndSharedMemoryWait) {
  const auto state = std::make_shared<comm::ThreadRendezvousState>(2);
  std::promise<void> done;
  std::thread other([&] {
    comm::ShmTransport transport(std::make_shared<comm::ThreadRendezvous>(state, 1, milliseconds(10000)));
    done.get_future().wait();
  });
  comm::ShmTransport transport(std::make_shared<comm::ThreadRendezvous>(state, 0, milliseconds(10000)));
  expect_ended([&] { transport.all_gather(at::full({2, 2}, 1.0))->wait(1, 2); });
  done.set_value();
  other.join();
}

TEST_F(Interrupts, EndRendezvous) {
  const ThreadRanks ranks(2, milliseconds(10000));
  expect_ended([&] { comm::get_transport(ranks.name(0)); });
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  interrupted = false;
  comm::HostRendezvous rendezvous({[store] { return store; }, "test", 0, 2, milliseconds(10000)});
  expect_ended([&] { rendezvous.exchange_memory(comm::SharedMemory::make(4096), [] {}); });
}

/// A Store whose server does not respond.
struct SilentStore : c10d::HashStore {
  bool check(const std::vector<std::string>&) override {
    released.get_future().wait();
    return false;
  }
  std::promise<void> released;
};

TEST(StoreExchange, UnresponsiveStoreTimesOut) {
  const auto store = c10::make_intrusive<SilentStore>();
  const auto start = Clock::now();
  const auto error = error_of([&] {
    comm::exchange_through_store(store, {.prefix = "p", .rank = 0, .size = 2, .timeout = milliseconds(200)}, "x");
  });
  EXPECT_THAT(error, AllOf(HasSubstr("the Store does not respond"), HasSubstr("200 ms")));
  EXPECT_LT(Clock::now() - start, milliseconds(1200));
  store->released.set_value();
}

TEST(StoreExchange, StoreErrorNamesRank) {
  struct Broken : c10d::HashStore {
    bool check(const std::vector<std::string>&) override { TORCH_CHECK(false, "it broke"); }
  };
  const auto error = error_of([&] {
    comm::exchange_through_store(c10::make_intrusive<Broken>(),
                                 {.prefix = "p", .rank = 0, .size = 2, .timeout = milliseconds(2000)}, "x");
  });
  EXPECT_THAT(error, AllOf(HasSubstr("the Store failed: it broke"), HasSubstr("rank 1")));
}

TEST(StoreExchange, StoreCountsGenerations) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  for (int64_t i = 0; i < 3; ++i)
    for (const int rank : {0, 1})
      EXPECT_EQ(comm::next_generation(store, {.prefix = "p", .rank = rank, .size = 2, .timeout = milliseconds(500)}),
                i);
}

}  // namespace
}  // namespace weft::testing
