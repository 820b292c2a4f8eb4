// One rank of test_ucx.py: ucx_rank RANK SIZE STORE TIMEOUT_MS ROUNDS
// Prints "ready" when its transport is connected, then "ok", or the time and text of an error. Exits with 0, or with 3
// after an error.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <cstdio>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "tests/dist/kill_point.h"
#include "weft/comm/ucx_plugin.h"

namespace {

using weft::comm::Transport;

at::Tensor block(int64_t round, int from, int64_t rows) {
  return at::arange(round + from, round + from + rows * 256, at::kFloat).view({rows, 256});
}

void check(const at::Tensor& got, const at::Tensor& expected) {
  TORCH_CHECK(at::equal(got, expected), "a block arrived changed");
}

void gather(Transport& transport, int64_t round, int64_t rows) {
  kill_point(round, 0);
  const auto collective = transport.all_gather(block(round, transport.rank(), rows));
  kill_point(round, 1);
  kill_point(round, 2);
  for (int from = 0; from < transport.size(); ++from) {
    collective->wait(from, rows);
    check(collective->incoming(from), block(round, from, rows));
    kill_point(round, 3);
  }
  kill_point(round, 4);
  collective->finish();
  kill_point(round, 5);
}

void scatter(Transport& transport, int64_t round, int64_t rows) {
  kill_point(round, 0);
  const auto collective = transport.reduce_scatter(rows, 256, at::kFloat);
  kill_point(round, 1);
  for (int to = 0; to < transport.size(); ++to) {
    collective->outgoing(to).copy_(block(round, transport.rank() + to, rows));
    for (int64_t done = 0; done < rows; done += 100) collective->mark_ready(to, std::min(rows, done + 100));
    collective->progress();
    kill_point(round, 2);
  }
  for (int from = 0; from < transport.size(); ++from) {
    collective->wait(from, rows);
    check(collective->incoming(from), block(round, from + transport.rank(), rows));
    kill_point(round, 3);
  }
  kill_point(round, 4);
  collective->finish();
  kill_point(round, 5);
}

void run(Transport& transport, int64_t rounds) {
  std::puts("ready");
  std::fflush(stdout);
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t rows = 1 + round * 37 % 900;
    if (round % 2) {
      gather(transport, round, rows);
    } else {
      scatter(transport, round, rows);
    }
  }
}

}  // namespace

int main(int, char** argv) {
  const int rank = std::atoi(argv[1]), size = std::atoi(argv[2]);
  std::unique_ptr<Transport> transport;
  try {
    transport = weft::comm::make_ucx_transport({c10::make_intrusive<c10d::FileStore>(argv[3], size), rank, size, "tp",
                                                std::chrono::milliseconds(std::atoi(argv[4]))});
    run(*transport, std::atoll(argv[5]));
    std::puts("ok");
    return 0;
  } catch (const c10::Error& error) {
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    std::printf("raised at %.3f: %s\n", now.count(), error.what_without_backtrace());
    return 3;
  }
}
