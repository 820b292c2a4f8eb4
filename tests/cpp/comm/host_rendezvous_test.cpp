#include "weft/comm/host_rendezvous.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/cpp/comm/thread_transports.h"
#include "weft/comm/local_socket.h"

namespace weft::testing {
namespace {

using namespace comm;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Store = c10::intrusive_ptr<c10d::Store>;

constexpr size_t kBytes = 8192;

HostRendezvous::Options options(const Store& store, int rank, int size, milliseconds timeout = milliseconds(10000)) {
  return {[store] { return store; }, "test", rank, size, timeout};
}

int open_files() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

/// Whether this process has a listening socket of a rendezvous; other tests of the host may have theirs at the same
/// time.
bool has_socket() {
  std::ifstream file("/proc/net/unix");
  const std::string all(std::istreambuf_iterator<char>(file), {});
  return all.find(c10::str("@weft-", ::getpid(), "-")) != std::string::npos;
}

TEST(HostRendezvous, RepeatedExchangeMapsMemoryOfEveryRank) {
  const int files = open_files();
  for (const int size : {1, 2, 4}) {
    const Store store = c10::make_intrusive<c10d::HashStore>();
    const auto errors = run_threads(size, [&](int rank) {
      HostRendezvous rendezvous(options(store, rank, size));
      for (const size_t bytes : {kBytes, 4 * kBytes + 1, kBytes}) {
        auto local = SharedMemory::make(bytes);
        local->data()[bytes - 1] = std::byte(rank + 1);
        const auto all = rendezvous.exchange_memory(local, [] {});
        for (int r = 0; r < size; ++r)
          TORCH_CHECK(all[r]->bytes() == bytes && all[r]->data()[bytes - 1] == std::byte(r + 1), "wrong memory");
      }
      TORCH_CHECK(rendezvous.group_id() != 0 && rendezvous.process((rank + 1) % size).alive(), "wrong group");
    });
    EXPECT_THAT(errors, Each(""));
  }
  EXPECT_EQ(open_files(), files);
  EXPECT_FALSE(has_socket());
}

TEST(HostRendezvous, MissingRankIsNamed) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  HostRendezvous rendezvous(options(store, 0, 2, milliseconds(100)));
  EXPECT_THAT(error_of([&] { rendezvous.exchange_memory(SharedMemory::make(kBytes), [] {}); }),
              AllOf(HasSubstr("rank 1"), HasSubstr("100 ms")));
}

TEST(HostRendezvous, SizeMismatchFailsEveryRank) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  const auto errors = run_threads(2, [&](int rank) {
    HostRendezvous(options(store, rank, 2)).exchange_memory(SharedMemory::make(kBytes << rank), [] {});
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("8192"), HasSubstr("16384"))));
}

// ---- rank 0 is an impostor -----------------------------------------------------------------------------------------

/// Writes an endpoint record for rank 0, accepts the connection of rank 1 and runs `fn` on it.
struct Impostor {
  Store store = c10::make_intrusive<c10d::HashStore>();
  HostIdentity host = HostIdentity::local();
  std::string socket = "weft-test-" + std::to_string(::getpid());
  std::function<void(const UniqueFd&)> fn = [](const UniqueFd&) {};

  struct Hello {
    char magic[8] = {'w', 'e', 'f', 't', 'm', 'e', 'm', '1'};
    uint64_t rank = 0;
    uint64_t token[2] = {7, 8};
  };

  /// The error of rank 1.
  std::string handshake_error() {
    const auto listener = listen_at(socket, 4);
    store->set("test/0/0", c10::str("weft1 ", kBytes, " 7 8 ", socket, " ", host.text()));
    std::atomic<bool> done = false;
    std::thread rank0([&] {
      UniqueFd connection;
      while (!done && !(connection = accept_one(listener))) std::this_thread::yield();
      if (connection) fn(connection);
      while (!done) std::this_thread::yield();
    });
    HostRendezvous rendezvous(options(store, 1, 2, milliseconds(500)));
    const auto error = error_of([&] { rendezvous.exchange_memory(SharedMemory::make(kBytes), [] {}); });
    done = true;
    rank0.join();
    return error;
  }
  std::string handshake_error_with(const UniqueFd& file) {
    fn = [&](const UniqueFd& connection) {
      const Hello hello;
      send_fd(connection, &hello, sizeof(hello), file);
    };
    return handshake_error();
  }
};

UniqueFd memory_file(off_t bytes, int seals) {
  UniqueFd file(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(file.get(), bytes), 0);
  EXPECT_EQ(::fcntl(file.get(), F_ADD_SEALS, seals), 0);
  return file;
}

constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

TEST(HostRendezvous, RejectsSocketOfAnotherProcess) {
  Impostor impostor;
  impostor.host.pid = 1;  // the endpoint record names another process than the one that listens
  EXPECT_THAT(impostor.handshake_error(),
              AllOf(HasSubstr("rank 0 (pid 1)"), HasSubstr("its socket belongs to process")));
}

TEST(HostRendezvous, RejectsPeerOfAnotherUserHostOrNamespace) {
  const auto handshake_error = [](auto change) {
    Impostor impostor;
    change(impostor.host);
    return impostor.handshake_error();
  };
  EXPECT_THAT(handshake_error([](HostIdentity& p) { p.uid += 1; }), HasSubstr("different user"));
  EXPECT_THAT(handshake_error([](HostIdentity& p) { p.boot_id = "other"; }), HasSubstr("different host"));
  EXPECT_THAT(handshake_error([](HostIdentity& p) { p.pid_namespace = "other"; }),
              HasSubstr("different PID namespace"));
  EXPECT_THAT(handshake_error([](HostIdentity& p) { p.net_namespace = "other"; }),
              HasSubstr("different network namespace"));
}

TEST(HostRendezvous, RejectsWrongToken) {
  Impostor impostor;
  const auto file = memory_file(kBytes, kSeals);
  impostor.fn = [&](const UniqueFd& connection) {
    Impostor::Hello hello;
    hello.token[1] = 9;
    send_fd(connection, &hello, sizeof(hello), file);
  };
  EXPECT_THAT(impostor.handshake_error(), HasSubstr("wrong token"));
}

TEST(HostRendezvous, RejectsUnexpectedFd) {
  Impostor impostor;
  EXPECT_THAT(impostor.handshake_error_with(memory_file(kBytes * 2, kSeals)),
              HasSubstr("has 16384 bytes, expected 8192"));
  EXPECT_THAT(impostor.handshake_error_with(memory_file(kBytes / 2, kSeals)),
              HasSubstr("has 4096 bytes, expected 8192"));
  EXPECT_THAT(impostor.handshake_error_with(memory_file(kBytes, F_SEAL_GROW)), HasSubstr("not a memfd sealed"));
  EXPECT_THAT(impostor.handshake_error_with(memory_file(kBytes, kSeals)), HasSubstr("not fully allocated"));
  EXPECT_THAT(impostor.handshake_error_with(UniqueFd(::open("/proc/self/exe", O_RDONLY))),
              HasSubstr("not a memfd sealed"));
}

TEST(HostRendezvous, RejectsTruncatedMessage) {
  Impostor impostor;
  const auto file = memory_file(kBytes, kSeals);
  impostor.fn = [&](const UniqueFd& connection) { send_fd(connection, "weft", 4, file); };
  EXPECT_THAT(impostor.handshake_error(), HasSubstr("malformed message, expected 32 bytes"));
}

TEST(HostRendezvous, SilentPeerTimesOutByName) {
  EXPECT_THAT(Impostor().handshake_error(), AllOf(HasSubstr("rank 0"), HasSubstr("no reply within 500 ms")));
}

TEST(HostRendezvous, UnknownConnectionsDoNotDelayRendezvous) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> done = false;
  std::thread intruder([&] {  // the right process, but without the token
    while (!done && !store->check({"test/0/0"})) std::this_thread::yield();
    std::string version, socket, word;
    std::istringstream endpoint(done ? "" : store->get_to_str("test/0/0"));
    endpoint >> version >> word >> word >> word >> socket;
    const auto silent = connect_to(socket), wrong = connect_to(socket);
    const auto file = memory_file(kBytes, kSeals);
    Impostor::Hello hello{.rank = 1};
    send_fd(wrong, &hello, sizeof(hello), file);
    while (!done) std::this_thread::yield();
  });
  const auto errors = run_threads(2, [&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(milliseconds(100));
    HostRendezvous(options(store, rank, 2)).exchange_memory(SharedMemory::make(kBytes), [] {});
  });
  done = true;
  intruder.join();
  EXPECT_THAT(errors, Each(""));
}

TEST(SharedMemory, OversizedRequestThrows) {
  EXPECT_THAT(error_of([] { SharedMemory::make(size_t{1} << 45); }),
              HasSubstr("Cannot allocate 35184372088832 bytes of shared memory"));
}

}  // namespace
}  // namespace weft::testing
