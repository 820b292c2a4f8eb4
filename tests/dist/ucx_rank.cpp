// One rank over UCX, for test_ucx.py: ucx_rank RANK SIZE STORE TIMEOUT_MS ROUNDS
// Prints "ready" when its link is made, then "ok", or when and what was raised. Ends with 0, or 3 if something was
// raised.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <cstdio>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "tests/dist/kill_point.h"
#include "weft/comm/ucx_plugin.h"

namespace {

using weft::comm::Link;

at::Tensor block(int64_t round, int from, int64_t rows) {
  return at::arange(round + from, round + from + rows * 256, at::kFloat).view({rows, 256});
}

void check(const at::Tensor& got, const at::Tensor& expected) {
  TORCH_CHECK(at::equal(got, expected), "a block arrived changed");
}

void gather(Link& link, int64_t round, int64_t rows) {
  reached(round, 0);
  const auto exchange = link.all_gather(block(round, link.rank(), rows));
  reached(round, 1);
  reached(round, 2);
  for (int from = 0; from < link.size(); ++from) {
    exchange->wait(from, rows);
    check(exchange->incoming(from), block(round, from, rows));
    reached(round, 3);
  }
  reached(round, 4);
  exchange->finish();
  reached(round, 5);
}

void scatter(Link& link, int64_t round, int64_t rows) {
  reached(round, 0);
  const auto exchange = link.reduce_scatter(rows, 256, at::kFloat);
  reached(round, 1);
  for (int to = 0; to < link.size(); ++to) {
    exchange->outgoing(to).copy_(block(round, link.rank() + to, rows));
    for (int64_t done = 0; done < rows; done += 100) exchange->publish(to, std::min(rows, done + 100));
    exchange->advance();
    reached(round, 2);
  }
  for (int from = 0; from < link.size(); ++from) {
    exchange->wait(from, rows);
    check(exchange->incoming(from), block(round, from + link.rank(), rows));
    reached(round, 3);
  }
  reached(round, 4);
  exchange->finish();
  reached(round, 5);
}

void run(Link& link, int64_t rounds) {
  std::puts("ready");
  std::fflush(stdout);
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t rows = 1 + round * 37 % 900;
    if (round % 2) {
      gather(link, round, rows);
    } else {
      scatter(link, round, rows);
    }
  }
}

}  // namespace

int main(int, char** argv) {
  const int rank = std::atoi(argv[1]), size = std::atoi(argv[2]);
  std::unique_ptr<Link> link;
  try {
    link = weft::comm::make_ucx_link({c10::make_intrusive<c10d::FileStore>(argv[3], size), rank, size, "tp",
                                      std::chrono::milliseconds(std::atoi(argv[4]))});
    run(*link, std::atoll(argv[5]));
    std::puts("ok");
    return 0;
  } catch (const c10::Error& error) {
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    std::printf("raised at %.3f: %s\n", now.count(), error.what_without_backtrace());
    return 3;
  }
}
