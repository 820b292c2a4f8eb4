#include "benchmarks/driver/signals.h"

#include <ATen/ops/zeros.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iostream>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "benchmarks/driver/ranks.h"
#include "weft/comm/host_rendezvous.h"
#include "weft/comm/shm_transport.h"

namespace bench {

const char* const kSignalsUsage = "weft_bench signals [ranks…]\n";

namespace {

using weft::comm::ShmTransport;
using Clock = std::chrono::steady_clock;

constexpr int kSamples = 41, kSignals = 1000;

/// Prints the median and the best latency in µs of one of the signals that `pass` sends.
void report(ShmTransport& transport, const char* what, double signals, const std::function<void()>& pass) {
  std::vector<double> samples;
  for (int i = 0; i < kSamples; ++i) {
    const auto start = Clock::now();
    pass();
    samples.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() / signals);
  }
  std::sort(samples.begin(), samples.end());
  if (transport.rank() == 0)
    std::cout << "ranks " << transport.size() << "  cores " << std::thread::hardware_concurrency() << "  " << what
              << "  us " << samples[kSamples / 2] << "  best " << samples[0] << std::endl;
}

/// Ping-pong between rank 0 and rank 1.
void one_way(ShmTransport& transport) {
  const auto collective = transport.reduce_scatter(kSignals, 1, at::kByte);
  const int peer = 1 - transport.rank();
  for (int i = 1; i <= kSignals; ++i) {
    if (transport.rank() == 0) collective->mark_ready(peer, i);
    collective->wait(peer, i);
    if (transport.rank() == 1) collective->mark_ready(peer, i);
  }
  collective->finish();
}

/// Every rank signals every other rank and waits for all of them.
void all_ranks(ShmTransport& transport) {
  const auto collective = transport.reduce_scatter(kSignals, 1, at::kByte);
  for (int i = 1; i <= kSignals; ++i) {
    for (int peer = 0; peer < transport.size(); ++peer)
      if (peer != transport.rank()) collective->mark_ready(peer, i);
    for (int peer = 0; peer < transport.size(); ++peer)
      if (peer != transport.rank()) collective->wait(peer, i);
  }
  collective->finish();
}

/// Complete collectives: fingerprint check, all-gather of one byte, finish.
void rounds(ShmTransport& transport) {
  const auto local = at::zeros({1, 1}, at::kByte);
  for (int i = 0; i < kSignals; ++i) {
    const auto collective = transport.all_gather(local);
    for (int peer = 0; peer < transport.size(); ++peer)
      if (peer != transport.rank()) collective->wait(peer, 1);
    collective->finish();
  }
}

/// Pins ranks to cores round-robin, so that samples do not depend on the scheduler.
void pin_to_core(int rank) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(rank % static_cast<int>(std::thread::hardware_concurrency()), &set);
  TORCH_CHECK(::sched_setaffinity(0, sizeof(set), &set) == 0, "cannot pin rank ", rank, " to a core");
}

int run_rank(int rank, int size, const std::string& store) {
  pin_to_core(rank);
  c10::intrusive_ptr<c10d::Store> found = c10::make_intrusive<c10d::FileStore>(store, size);
  ShmTransport transport(std::make_shared<weft::comm::HostRendezvous>(weft::comm::HostRendezvous::Options{
      [&] { return found; }, "signals", rank, size, std::chrono::milliseconds(60000)}));
  if (size == 2) report(transport, "one way", 2 * kSignals, [&] { one_way(transport); });
  report(transport, "to and from all", kSignals, [&] { all_ranks(transport); });
  report(transport, "all-gather of a byte", kSignals, [&] { rounds(transport); });
  return 0;
}

}  // namespace

int run_signals(const std::vector<std::string>& words) {
  if (words.size() == 4 && words[0] == "--rank") return run_rank(std::stoi(words[1]), std::stoi(words[2]), words[3]);
  std::vector<int> sizes;
  for (const auto& word : words) sizes.push_back(std::stoi(word));
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (sizes.empty()) sizes = {2, 2 * cores};
  int status = 0;
  for (const int size : sizes) {
    const auto store = std::filesystem::temp_directory_path() / ("weft_signals_" + std::to_string(::getpid()));
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < size; ++rank)
      ranks.push_back(start_rank({"signals", "--rank", std::to_string(rank), std::to_string(size), store.string()}));
    for (const pid_t pid : ranks) {
      int ended = 0;
      ::waitpid(pid, &ended, 0);
      status |= ended;
    }
    std::filesystem::remove(store);
  }
  return status == 0 ? 0 : 1;
}

}  // namespace bench
