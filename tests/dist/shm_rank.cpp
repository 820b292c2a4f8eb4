// One rank of test_shm_transport.py: a shared-memory transport with a FileStore for the rendezvous.
//
//   shm_rank RANK SIZE STORE TIMEOUT_MS ROUNDS [GROUP [REQUEST_BYTES]]
//
// Prints "started" when all ranks run, creates the transport, prints "ready", runs ROUNDS collectives of random kind
// and size (0: without end), checks every value, and prints "done". Prints an error as "error MS TEXT", where MS is the
// duration of the call that raised it in milliseconds. REQUEST_BYTES requests a block of that size at the end.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "tests/dist/kill_point.h"
#include "weft/comm/host_rendezvous.h"
#include "weft/comm/shm_transport.h"

namespace {

using weft::comm::InFlightCollective;
using weft::comm::ShmTransport;
using Clock = std::chrono::steady_clock;

int64_t value(int from, int to, int64_t round, int64_t i) { return ((round * 8 + from) * 8 + to) * 1000003 + i; }

void fill(const at::Tensor& block, int from, int to, int64_t round) {
  auto* data = block.data_ptr<int64_t>();
  for (int64_t i = 0; i < block.numel(); ++i) data[i] = value(from, to, round, i);
}

void expect_filled(const at::Tensor& block, int from, int to, int64_t round) {
  const auto* data = block.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < block.numel(); ++i)
    TORCH_CHECK(data[i] == value(from, to, round, i), "wrong value from rank ", from, " in round ", round);
}

/// One collective; `to` of an all-gather block is 7.
void run_round(ShmTransport& transport, int64_t round, bool gather, int64_t rows, int64_t columns) {
  const int me = transport.rank();
  std::unique_ptr<InFlightCollective> collective;
  kill_point(round, 0);
  if (gather) {
    const auto local = at::empty({rows, columns}, at::kLong);
    fill(local, me, 7, round);
    collective = transport.all_gather(local);
    kill_point(round, 1);
    kill_point(round, 2);
  } else {
    collective = transport.reduce_scatter(rows, columns, at::kLong);
    kill_point(round, 1);
    for (int to = 0; to < transport.size(); ++to) {
      if (to == me) continue;
      fill(collective->outgoing(to), me, to, round);
      collective->mark_ready(to, rows);
      kill_point(round, 2);
    }
  }
  for (int from = 0; from < transport.size(); ++from) {
    if (from == me) continue;
    collective->wait(from, rows);
    expect_filled(collective->incoming(from), from, gather ? 7 : me, round);
    kill_point(round, 3);
  }
  kill_point(round, 4);
  collective->finish();
  kill_point(round, 5);
}

struct Arguments {
  int rank, size;
  std::string store;
  std::chrono::milliseconds timeout;
  int64_t rounds;
  std::string group;
  int64_t request_bytes;
};

Clock::time_point call_began;

void run(const Arguments& a) {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::FileStore>(a.store, a.size);
  store->add("started", 1);
  while (store->add("started", 0) < a.size) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  std::cout << "started" << std::endl;
  call_began = Clock::now();
  ShmTransport transport(std::make_shared<weft::comm::HostRendezvous>(
      weft::comm::HostRendezvous::Options{[&] { return store; }, a.group, a.rank, a.size, a.timeout}));
  std::cout << "ready" << std::endl;
  std::mt19937 random(11);  // all ranks use the same sizes
  for (int64_t round = 1; a.rounds == 0 || round <= a.rounds; ++round) {
    const int64_t max_rows = random() % 50 == 0 ? 3000 : 40;
    const int64_t rows = random() % (max_rows + 1), columns = 1 + random() % 60;
    call_began = Clock::now();
    run_round(transport, round, random() % 2 == 0, rows, columns);
  }
  call_began = Clock::now();
  if (a.request_bytes) transport.reduce_scatter(a.request_bytes / 8, 1, at::kLong);
  std::cout << "done" << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) return 2;
  const Arguments arguments{std::atoi(argv[1]),
                            std::atoi(argv[2]),
                            argv[3],
                            std::chrono::milliseconds(std::atoll(argv[4])),
                            std::atoll(argv[5]),
                            argc > 6 ? argv[6] : "group",
                            argc > 7 ? std::atoll(argv[7]) : 0};
  try {
    run(arguments);
    return 0;
  } catch (const c10::Error& error) {
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - call_began).count();
    std::cout << "error " << ms << " " << error.what_without_backtrace() << std::endl;
    return 1;
  }
}
