// One of two ranks of benchmarks/network.py, over UCX:
//   network_rank RANK STORE link                      how long a block takes
//   network_rank RANK STORE balance MEGABYTES ROUNDS  schedules whose product takes as long as their blocks
// Rank 0 prints a line of JSON for each figure.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "weft/comm/ucx_plugin.h"
#include "weft/overlap/schedules.h"

namespace {

using at::Tensor;
using weft::comm::Link;
using weft::kernels::Matrix;
using Run = std::function<void()>;
using Clock = std::chrono::steady_clock;

constexpr double kSteady = 1.10;  // the two products of a round may differ by so much

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// A list in JSON.
std::string list(const std::vector<double>& values) {
  std::string out;
  for (const double value : values) out += (out.empty() ? "" : ", ") + std::to_string(value);
  return "[" + out + "]";
}

Tensor random(int64_t rows, int64_t columns) { return at::randn({rows, columns}).to(at::kBFloat16); }

/// The larger of both ranks' numbers, on both.
double larger(Link& link, double mine) {
  const auto exchange = link.all_gather(at::empty({1, 1}, at::kDouble).fill_(mine));
  exchange->wait(1 - link.rank(), 1);
  const double theirs = exchange->incoming(1 - link.rank()).item<double>();
  exchange->finish();
  return std::max(mine, theirs);
}

/// Seconds of the slower rank; both start together.
double seconds(Link& link, const Run& run) {
  larger(link, 0);
  const auto start = Clock::now();
  run();
  return larger(link, std::chrono::duration<double>(Clock::now() - start).count());
}

/// Both ranks give a block and get one.
void swap(Link& link, const Tensor& mine) {
  const auto exchange = link.all_gather(mine);
  exchange->wait(1 - link.rank(), mine.size(0));
  exchange->finish();
}

void print_link(Link& link) {
  for (const int64_t bytes : {8, 65536, 1 << 20, 4 << 20, 16 << 20}) {
    const int64_t columns = std::min<int64_t>(bytes / 2, 1024);
    const auto mine = random(bytes / 2 / columns, columns);
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) swap(link, mine);
    for (int i = 0; i < (bytes < 100000 ? 300 : 9); ++i) {
      const auto start = Clock::now();
      swap(link, mine);
      times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    if (link.rank() == 0)
      std::printf("{\"bytes\": %lld, \"us\": %.1f, \"MB/s\": %.1f}\n", static_cast<long long>(bytes),
                  1e6 * median(times), static_cast<double>(bytes) / median(times) / 1e6);
  }
}

/// A schedule and its two parts alone: the product, and the blocks that travel.
struct Problem {
  std::string name, shape;
  Run schedule, product, blocks;
};

constexpr int64_t kWidth = 1024;  // columns of what travels

Problem all_gather(Link& link, int64_t rows, int64_t n) {
  const auto x = random(2 * rows, kWidth), w = random(n, kWidth) / std::sqrt(kWidth);
  const auto y = at::empty({2 * rows, n}, x.options());
  const auto mine = x.narrow(0, 0, rows);
  return {"all_gather_gemm", c10::str("S=", 2 * rows, " K=", kWidth, " N=", n),
          [=, &link] { weft::overlap::all_gather_gemm(link, mine, Matrix(w, true), {.out = y, .weight = true}); },
          [=] { weft::kernels::gemm(x, Matrix(w, true), {.out = y, .weight = true}); },
          [=, &link] { swap(link, mine); }};
}

Problem reduce_scatter(Link& link, int64_t rows, int64_t k) {
  const auto x = random(2 * rows, k), w = random(kWidth, k) / std::sqrt(k), mine = random(rows, kWidth);
  const auto y = at::empty({2 * rows, kWidth}, x.options());
  return {"gemm_reduce_scatter", c10::str("S=", 2 * rows, " K=", k, " N=", kWidth),
          [=, &link] { weft::overlap::gemm_reduce_scatter(link, x, Matrix(w, true), {.weight = true}); },
          [=] { weft::kernels::gemm(x, Matrix(w, true), {.out = y, .weight = true}); },
          [=, &link] { swap(link, mine); }};
}

using Make = std::function<Problem(Link&, int64_t rows, int64_t length)>;

/// The problem whose product takes as long as its blocks.
Problem at_balance(Link& link, const Make& make, int64_t rows) {
  const auto typical = [&](const Run& run) {
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) times.push_back(seconds(link, run));
    return median(times);
  };
  int64_t length = 1024;
  for (int i = 0; i < 3; ++i) {
    const auto problem = make(link, rows, length);
    const double ratio = typical(problem.blocks) / typical(problem.product);
    length = std::clamp<int64_t>(std::lround(ratio * static_cast<double>(length) / 64) * 64, 64, 1 << 16);
  }
  return make(link, rows, length);
}

/// Rounds of blocks, product, schedule, product; those whose products differ do not count.
void print_balance(Link& link, const Problem& problem, int rounds) {
  std::vector<double> products, blocks, schedules, ratios, hidden, controls;
  for (int i = 0; i < 4 * rounds && static_cast<int>(ratios.size()) < rounds; ++i) {
    const double block = seconds(link, problem.blocks), before = seconds(link, problem.product);
    const double schedule = seconds(link, problem.schedule), after = seconds(link, problem.product);
    if (std::max(before, after) > kSteady * std::min(before, after)) continue;
    const double product = (before + after) / 2;
    blocks.push_back(block);
    products.push_back(product);
    schedules.push_back(schedule);
    ratios.push_back(schedule / std::max(product, block));
    hidden.push_back(1 - (schedule - product) / block);
    controls.push_back(after / before);
  }
  if (link.rank() == 0)
    std::printf(
        "{\"schedule\": \"%s\", \"shape\": \"%s\", \"product_ms\": %.2f, \"blocks_ms\": %.2f, \"ms\": %.2f, "
        "\"ratios\": %s, \"hidden\": %s, \"controls\": %s}\n",
        problem.name.c_str(), problem.shape.c_str(), 1e3 * median(products), 1e3 * median(blocks),
        1e3 * median(schedules), list(ratios).c_str(), list(hidden).c_str(), list(controls).c_str());
}

void stay_on(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::setenv("WEFT_UCX_TRUSTED", "1", 1);  // the namespaces hold nobody else
  const int rank = std::atoi(argv[1]);
  stay_on(rank);
  const auto link = weft::comm::make_ucx_link(
      {c10::make_intrusive<c10d::FileStore>(argv[2], 2), rank, 2, "benchmark", std::chrono::milliseconds(20000)});
  if (argc < 6) {
    print_link(*link);
    return 0;
  }
  const auto rows = static_cast<int64_t>(std::atof(argv[4]) * 1e6) / 2 / kWidth / 32 * 32;
  for (const Make& make : {Make(all_gather), Make(reduce_scatter)}) {
    print_balance(*link, at_balance(*link, make, rows), std::atoi(argv[5]));
    std::fflush(stdout);
  }
  return 0;
}
