#include "weft/comm/host_meeting.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/cpp/comm/thread_links.h"
#include "weft/comm/local_socket.h"

namespace weft::testing {
namespace {

using namespace comm;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Store = c10::intrusive_ptr<c10d::Store>;

constexpr size_t kBytes = 8192;

HostMeeting::Options options(const Store& store, int rank, int size, milliseconds timeout = milliseconds(10000)) {
  return {[store] { return store; }, "test", rank, size, timeout};
}

int open_files() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

bool has_socket(const std::string& part) {
  std::ifstream file("/proc/net/unix");
  const std::string all(std::istreambuf_iterator<char>(file), {});
  return all.find(part) != std::string::npos;
}

TEST(HostMeeting, EveryRankSeesEveryMemoryAgainAndAgain) {
  const int files = open_files();
  for (const int size : {1, 2, 4}) {
    const Store store = c10::make_intrusive<c10d::HashStore>();
    const auto errors = run_threads(size, [&](int rank) {
      HostMeeting meeting(options(store, rank, size));
      for (const size_t bytes : {kBytes, 4 * kBytes + 1, kBytes}) {
        auto mine = Memory::make(bytes);
        mine->data()[bytes - 1] = std::byte(rank + 1);
        const auto all = meeting.meet(mine, [] {});
        for (int r = 0; r < size; ++r)
          TORCH_CHECK(all[r]->bytes() == bytes && all[r]->data()[bytes - 1] == std::byte(r + 1), "wrong memory");
      }
      TORCH_CHECK(meeting.group() != 0 && meeting.process((rank + 1) % size).alive(), "wrong group");
    });
    EXPECT_THAT(errors, Each(""));
  }
  EXPECT_EQ(open_files(), files);
  EXPECT_FALSE(has_socket("@weft-"));
}

TEST(HostMeeting, ARankThatIsMissingIsNamed) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  HostMeeting meeting(options(store, 0, 2, milliseconds(100)));
  EXPECT_THAT(error_of([&] { meeting.meet(Memory::make(kBytes), [] {}); }),
              AllOf(HasSubstr("rank 1"), HasSubstr("100 ms")));
}

TEST(HostMeeting, MemoryOfDifferentSizesIsRefusedByAll) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  const auto errors =
      run_threads(2, [&](int rank) { HostMeeting(options(store, rank, 2)).meet(Memory::make(kBytes << rank), [] {}); });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("8192"), HasSubstr("16384"))));
}

// ---- a rank 0 that is not what it should be ------------------------------------------------------------------------

/// Publishes a card for rank 0 and then does what `act` says with the connection that rank 1 makes.
struct Impostor {
  Store store = c10::make_intrusive<c10d::HashStore>();
  Place place = Place::here();
  std::string socket = "weft-test-" + std::to_string(::getpid());
  std::function<void(const Descriptor&)> act = [](const Descriptor&) {};

  struct Hello {
    char mark[8] = {'w', 'e', 'f', 't', 'm', 'e', 'm', '1'};
    uint64_t rank = 0;
    uint64_t token[2] = {7, 8};
  };

  /// What rank 1 raises.
  std::string met() {
    const auto listener = listen_at(socket, 4);
    store->set("test/0/0", c10::str("weft1 ", kBytes, " 7 8 ", socket, " ", place.text()));
    std::atomic<bool> over = false;
    std::thread rank0([&] {
      Descriptor connection;
      while (!over && !(connection = accept_one(listener))) std::this_thread::yield();
      if (connection) act(connection);
      while (!over) std::this_thread::yield();
    });
    HostMeeting meeting(options(store, 1, 2, milliseconds(500)));
    const auto error = error_of([&] { meeting.meet(Memory::make(kBytes), [] {}); });
    over = true;
    rank0.join();
    return error;
  }
  std::string met_with(const Descriptor& file) {
    act = [&](const Descriptor& connection) {
      const Hello hello;
      send_file(connection, &hello, sizeof(hello), file);
    };
    return met();
  }
};

Descriptor memory_file(off_t bytes, int seals) {
  Descriptor file(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(file.get(), bytes), 0);
  EXPECT_EQ(::fcntl(file.get(), F_ADD_SEALS, seals), 0);
  return file;
}

constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

TEST(HostMeeting, ASquatterOnTheSocketIsRefused) {
  Impostor impostor;
  impostor.place.pid = 1;  // the card names another process than the one that listens
  EXPECT_THAT(impostor.met(), AllOf(HasSubstr("rank 0 (pid 1)"), HasSubstr("its socket belongs to process")));
}

TEST(HostMeeting, APeerOfAnotherUserHostOrNamespaceIsRefusedByName) {
  const auto met = [](auto change) {
    Impostor impostor;
    change(impostor.place);
    return impostor.met();
  };
  EXPECT_THAT(met([](Place& p) { p.uid += 1; }), HasSubstr("another user"));
  EXPECT_THAT(met([](Place& p) { p.boot = "other"; }), HasSubstr("another host"));
  EXPECT_THAT(met([](Place& p) { p.pid_space = "other"; }), HasSubstr("another process id namespace"));
  EXPECT_THAT(met([](Place& p) { p.net_space = "other"; }), HasSubstr("another network namespace"));
}

TEST(HostMeeting, AWrongTokenIsRefused) {
  Impostor impostor;
  const auto file = memory_file(kBytes, kSeals);
  impostor.act = [&](const Descriptor& connection) {
    Impostor::Hello hello;
    hello.token[1] = 9;
    send_file(connection, &hello, sizeof(hello), file);
  };
  EXPECT_THAT(impostor.met(), HasSubstr("wrong token"));
}

TEST(HostMeeting, ADescriptorOfAnythingButTheAgreedMemoryIsRefused) {
  Impostor impostor;
  EXPECT_THAT(impostor.met_with(memory_file(kBytes * 2, kSeals)), HasSubstr("has 16384 bytes, expected 8192"));
  EXPECT_THAT(impostor.met_with(memory_file(kBytes / 2, kSeals)), HasSubstr("has 4096 bytes, expected 8192"));
  EXPECT_THAT(impostor.met_with(memory_file(kBytes, F_SEAL_GROW)), HasSubstr("not memory sealed"));
  EXPECT_THAT(impostor.met_with(memory_file(kBytes, kSeals)), HasSubstr("not allocated in full"));
  EXPECT_THAT(impostor.met_with(Descriptor(::open("/proc/self/exe", O_RDONLY))), HasSubstr("not memory sealed"));
}

TEST(HostMeeting, AMessageThatIsCutShortIsRefused) {
  Impostor impostor;
  const auto file = memory_file(kBytes, kSeals);
  impostor.act = [&](const Descriptor& connection) { send_file(connection, "weft", 4, file); };
  EXPECT_THAT(impostor.met(), HasSubstr("not one of known length"));
}

TEST(HostMeeting, APeerThatNeverAnswersIsNamedAtTheTimeout) {
  EXPECT_THAT(Impostor().met(), AllOf(HasSubstr("rank 0"), HasSubstr("no answer within 500 ms")));
}

TEST(HostMeeting, StrangersAtTheDoorHoldNobodyUp) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> over = false;
  std::thread stranger([&] {  // of the right process, even, but without a token
    while (!over && !store->check({"test/0/0"})) std::this_thread::yield();
    std::string version, socket, word;
    std::istringstream card(over ? "" : store->get_to_str("test/0/0"));
    card >> version >> word >> word >> word >> socket;
    const auto silent = connect_to(socket), wrong = connect_to(socket);
    const auto file = memory_file(kBytes, kSeals);
    Impostor::Hello hello{.rank = 1};
    send_file(wrong, &hello, sizeof(hello), file);
    while (!over) std::this_thread::yield();
  });
  const auto errors = run_threads(2, [&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(milliseconds(100));
    HostMeeting(options(store, rank, 2)).meet(Memory::make(kBytes), [] {});
  });
  over = true;
  stranger.join();
  EXPECT_THAT(errors, Each(""));
}

TEST(Memory, MoreThanThereIsIsRefusedWithoutTouchingIt) {
  EXPECT_THAT(error_of([] { Memory::make(size_t{1} << 45); }), HasSubstr("No 35184372088832 bytes of shared memory"));
}

}  // namespace
}  // namespace weft::testing
