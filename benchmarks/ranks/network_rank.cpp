// One of the two ranks of benchmarks/network.py, over UCX:
//   network_rank RANK STORE link                      latency and bandwidth of a block
//   network_rank RANK STORE balance MEGABYTES ROUNDS  schedules whose GEMM takes as long as their blocks
// Rank 0 prints a line of JSON per result.
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
using weft::comm::Transport;
using weft::kernels::Matrix;
using Run = std::function<void()>;
using Clock = std::chrono::steady_clock;

constexpr double kSteady = 1.10;  // maximum ratio of the two GEMM times of a round

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// Formats a list as JSON.
std::string list(const std::vector<double>& values) {
  std::string out;
  for (const double value : values) out += (out.empty() ? "" : ", ") + std::to_string(value);
  return "[" + out + "]";
}

Tensor random(int64_t rows, int64_t columns) { return at::randn({rows, columns}).to(at::kBFloat16); }

/// Max all-reduce of one number over both ranks.
double larger(Transport& transport, double local) {
  const auto collective = transport.all_gather(at::empty({1, 1}, at::kDouble).fill_(local));
  collective->wait(1 - transport.rank(), 1);
  const double remote = collective->incoming(1 - transport.rank()).item<double>();
  collective->finish();
  return std::max(local, remote);
}

/// Seconds of the slower rank; both ranks start together.
double seconds(Transport& transport, const Run& run) {
  larger(transport, 0);
  const auto start = Clock::now();
  run();
  return larger(transport, std::chrono::duration<double>(Clock::now() - start).count());
}

/// Both ranks send a block and receive one.
void swap(Transport& transport, const Tensor& local) {
  const auto collective = transport.all_gather(local);
  collective->wait(1 - transport.rank(), local.size(0));
  collective->finish();
}

void print_transport(Transport& transport) {
  for (const int64_t bytes : {8, 65536, 1 << 20, 4 << 20, 16 << 20}) {
    const int64_t columns = std::min<int64_t>(bytes / 2, 1024);
    const auto local = random(bytes / 2 / columns, columns);
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) swap(transport, local);
    for (int i = 0; i < (bytes < 100000 ? 300 : 9); ++i) {
      const auto start = Clock::now();
      swap(transport, local);
      times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    if (transport.rank() == 0)
      std::printf("{\"bytes\": %lld, \"us\": %.1f, \"MB/s\": %.1f}\n", static_cast<long long>(bytes),
                  1e6 * median(times), static_cast<double>(bytes) / median(times) / 1e6);
  }
}

/// A schedule, and its two parts alone: the GEMM, and the transfer of the blocks.
struct Problem {
  std::string name, shape;
  Run schedule, product, blocks;
};

constexpr int64_t kWidth = 1024;  // columns of the transferred blocks

Problem all_gather(Transport& transport, int64_t rows, int64_t n) {
  const auto x = random(2 * rows, kWidth), w = random(n, kWidth) / std::sqrt(kWidth);
  const auto y = at::empty({2 * rows, n}, x.options());
  const auto local = x.narrow(0, 0, rows);
  return {"all_gather_gemm", c10::str("S=", 2 * rows, " K=", kWidth, " N=", n),
          [=, &transport] {
            weft::overlap::all_gather_gemm(transport, local, Matrix(w, true), {.out = y, .b_is_weight = true});
          },
          [=] { weft::kernels::gemm(x, Matrix(w, true), {.out = y, .b_is_weight = true}); },
          [=, &transport] { swap(transport, local); }};
}

Problem reduce_scatter(Transport& transport, int64_t rows, int64_t k) {
  const auto x = random(2 * rows, k), w = random(kWidth, k) / std::sqrt(k), local = random(rows, kWidth);
  const auto y = at::empty({2 * rows, kWidth}, x.options());
  return {"gemm_reduce_scatter", c10::str("S=", 2 * rows, " K=", k, " N=", kWidth),
          [=, &transport] { weft::overlap::gemm_reduce_scatter(transport, x, Matrix(w, true), {.b_is_weight = true}); },
          [=] { weft::kernels::gemm(x, Matrix(w, true), {.out = y, .b_is_weight = true}); },
          [=, &transport] { swap(transport, local); }};
}

using Make = std::function<Problem(Transport&, int64_t rows, int64_t length)>;

/// Returns the problem whose GEMM takes as long as its blocks.
Problem at_balance(Transport& transport, const Make& make, int64_t rows) {
  const auto typical = [&](const Run& run) {
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) times.push_back(seconds(transport, run));
    return median(times);
  };
  int64_t length = 1024;
  for (int i = 0; i < 3; ++i) {
    const auto problem = make(transport, rows, length);
    const double ratio = typical(problem.blocks) / typical(problem.product);
    length = std::clamp<int64_t>(std::lround(ratio * static_cast<double>(length) / 64) * 64, 64, 1 << 16);
  }
  return make(transport, rows, length);
}

/// Runs rounds of blocks, GEMM, schedule, GEMM; rounds whose GEMM times differ do not count.
void print_balance(Transport& transport, const Problem& problem, int rounds) {
  std::vector<double> products, blocks, schedules, ratios, hidden, controls;
  for (int i = 0; i < 4 * rounds && static_cast<int>(ratios.size()) < rounds; ++i) {
    const double block = seconds(transport, problem.blocks), before = seconds(transport, problem.product);
    const double schedule = seconds(transport, problem.schedule), after = seconds(transport, problem.product);
    if (std::max(before, after) > kSteady * std::min(before, after)) continue;
    const double product = (before + after) / 2;
    blocks.push_back(block);
    products.push_back(product);
    schedules.push_back(schedule);
    ratios.push_back(schedule / std::max(product, block));
    hidden.push_back(1 - (schedule - product) / block);
    controls.push_back(after / before);
  }
  if (transport.rank() == 0)
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
  ::setenv("WEFT_UCX_TRUSTED", "1", 1);  // no other process is in the namespaces
  const int rank = std::atoi(argv[1]);
  stay_on(rank);
  const auto transport = weft::comm::make_ucx_transport(
      {c10::make_intrusive<c10d::FileStore>(argv[2], 2), rank, 2, "benchmark", std::chrono::milliseconds(20000)});
  if (argc < 6) {
    print_transport(*transport);
    return 0;
  }
  const auto rows = static_cast<int64_t>(std::atof(argv[4]) * 1e6) / 2 / kWidth / 32 * 32;
  for (const Make& make : {Make(all_gather), Make(reduce_scatter)}) {
    print_balance(*transport, at_balance(*transport, make, rows), std::atoi(argv[5]));
    std::fflush(stdout);
  }
  return 0;
}
