// What ranks do before and after training, for benchmarks/start.py:
//   start_rank threads RANKS [MS]         ranks as threads, one every MS milliseconds: agreement on a transport through
//   a
//                                         Store in this process
//   start_rank process RANK RANKS PORT    one of RANKS processes of this host, over a TCPStore: agreement, rendezvous
//                                         over sockets, collectives in shared memory, teardown
// Prints a line of JSON: seconds of each phase, and the messages to the Store and their bytes.
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "weft/comm/host_rendezvous.h"
#include "weft/comm/shm_transport.h"
#include "weft/comm/store_exchange.h"
#include "weft/comm/transport_selection.h"

namespace {

using Clock = std::chrono::steady_clock;
using Store = c10::intrusive_ptr<c10d::Store>;
using Keys = std::vector<std::string>;
using Bytes = std::vector<uint8_t>;

constexpr std::chrono::milliseconds kTimeout = std::chrono::minutes(5);
constexpr int kCollectives = 20;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Counts the requests of a rank and the bytes of keys and values.
class CountingStore final : public c10d::Store {
 public:
  explicit CountingStore(::Store inner) : inner_(std::move(inner)) {}

  c10::intrusive_ptr<c10d::Store> clone() override { TORCH_CHECK(false, "not counted"); }
  void set(const std::string& key, const Bytes& value) override {
    count(key.size() + value.size());
    inner_->set(key, value);
  }
  Bytes get(const std::string& key) override {
    auto value = inner_->get(key);
    count(key.size() + value.size());
    return value;
  }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    auto values = inner_->multiGet(keys);
    size_t bytes = bytes_of(keys);
    for (const auto& value : values) bytes += value.size();
    count(bytes);
    return values;
  }
  int64_t add(const std::string& key, int64_t value) override {
    count(key.size() + sizeof(value));
    return inner_->add(key, value);
  }
  bool check(const Keys& keys) override {
    count(bytes_of(keys));
    return inner_->check(keys);
  }
  // Not used by what is measured.
  bool deleteKey(const std::string&) override { TORCH_CHECK(false, "not counted"); }
  int64_t getNumKeys() override { TORCH_CHECK(false, "not counted"); }
  void wait(const Keys&) override { TORCH_CHECK(false, "not counted"); }
  void wait(const Keys&, const std::chrono::milliseconds&) override { TORCH_CHECK(false, "not counted"); }

  int64_t messages() const { return messages_; }
  int64_t bytes() const { return bytes_; }

 private:
  static size_t bytes_of(const Keys& keys) {
    size_t bytes = 0;
    for (const auto& key : keys) bytes += key.size();
    return bytes;
  }
  void count(size_t bytes) {
    ++messages_;
    bytes_ += static_cast<int64_t>(bytes);
  }
  ::Store inner_;
  std::atomic<int64_t> messages_ = 0, bytes_ = 0;
};

/// The exchange in which ranks agree on a transport.
void agree(const ::Store& store, int rank, int ranks) {
  weft::comm::StoreExchangeOptions options{"weft/group", rank, ranks, kTimeout};
  options.prefix += c10::str("/", weft::comm::next_generation(store, options));
  const auto texts = weft::comm::exchange_through_store(store, options, weft::comm::local_peer_info());
  TORCH_CHECK(static_cast<int>(texts.size()) == ranks);
  weft::comm::select_transport(texts);
}

void run_threads(int ranks, int ms) {
  const ::Store common = c10::make_intrusive<c10d::HashStore>();
  std::vector<c10::intrusive_ptr<CountingStore>> stores;
  for (int rank = 0; rank < ranks; ++rank) stores.push_back(c10::make_intrusive<CountingStore>(common));
  const auto start = Clock::now();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      std::this_thread::sleep_for(std::chrono::milliseconds(rank * ms));
      agree(stores[rank], rank, ranks);
    });
  for (auto& thread : threads) thread.join();
  const double spent = seconds_since(start);
  int64_t most_messages = 0, most_bytes = 0, all_messages = 0;
  for (const auto& store : stores) {
    most_messages = std::max(most_messages, store->messages());
    most_bytes = std::max(most_bytes, store->bytes());
    all_messages += store->messages();
  }
  std::printf(R"({"ranks": %d, "agreement_s": %.4f, "messages": %lld, "mean_messages": %.1f, "bytes": %lld})"
              "\n",
              ranks, spent, static_cast<long long>(most_messages), static_cast<double>(all_messages) / ranks,
              static_cast<long long>(most_bytes));
}

/// Open files, sockets and threads of this process.
int64_t resources() {
  int64_t found = 0;
  for (const auto* folder : {"/proc/self/fd", "/proc/self/task"})
    found += std::distance(std::filesystem::directory_iterator(folder), {});
  return found;
}

void gather(weft::comm::ShmTransport& transport, const at::Tensor& local) {
  const auto collective = transport.all_gather(local);
  for (int peer = 0; peer < transport.size(); ++peer)
    if (peer != transport.rank()) collective->wait(peer, local.size(0));
  collective->finish();
}

void run_process(int rank, int ranks, uint16_t port) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = rank == 0;
  options.timeout = kTimeout;
  const ::Store tcp = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  tcp->add("started", 1);
  while (tcp->add("started", 0) < ranks) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const auto store = c10::make_intrusive<CountingStore>(tcp);
  const ::Store counted = store;
  auto start = Clock::now();
  agree(counted, rank, ranks);
  const double agreement = seconds_since(start);
  const auto before = resources();
  start = Clock::now();
  auto transport = std::make_unique<weft::comm::ShmTransport>(std::make_shared<weft::comm::HostRendezvous>(
      weft::comm::HostRendezvous::Options{[&] { return counted; }, "weft/group/memory", rank, ranks, kTimeout}));
  const auto local = at::zeros({16, 16});
  gather(*transport, local);
  const double rendezvous = seconds_since(start);
  const auto at_start = store->messages();
  start = Clock::now();
  for (int i = 0; i < kCollectives; ++i) gather(*transport, local);
  const double collective = seconds_since(start) / kCollectives;
  const auto per_step = store->messages() - at_start;
  start = Clock::now();
  transport.reset();
  const double teardown = seconds_since(start);
  std::printf(
      R"({"rank": %d, "ranks": %d, "agreement_s": %.4f, "rendezvous_s": %.4f, "collective_s": %.6f, "teardown_s": %.4f, )"
      R"("messages": %lld, "bytes": %lld, "messages_of_collectives": %lld, "leftovers": %lld})"
      "\n",
      rank, ranks, agreement, rendezvous, collective, teardown, static_cast<long long>(store->messages()),
      static_cast<long long>(store->bytes()), static_cast<long long>(per_step),
      static_cast<long long>(resources() - before));
  tcp->add("ended", 1);
  const auto deadline = Clock::now() + kTimeout;
  while (rank == 0 && tcp->add("ended", 0) < ranks && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

}  // namespace

int main(int argc, char** argv) {
  if ((argc == 3 || argc == 4) && std::string_view(argv[1]) == "threads") {
    run_threads(std::atoi(argv[2]), argc == 4 ? std::atoi(argv[3]) : 0);
    return 0;
  }
  if (argc == 5 && std::string_view(argv[1]) == "process") {
    run_process(std::atoi(argv[2]), std::atoi(argv[3]), static_cast<uint16_t>(std::atoi(argv[4])));
    return 0;
  }
  std::fprintf(stderr, "usage: start_rank threads RANKS [MS] | process RANK RANKS PORT\n");
  return 2;
}
