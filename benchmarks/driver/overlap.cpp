#include "benchmarks/driver/overlap.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "benchmarks/driver/clock.h"
#include "benchmarks/driver/ranks.h"
#include "benchmarks/driver/report.h"
#include "weft/comm/host_rendezvous.h"
#include "weft/comm/shm_transport.h"
#include "weft/kernels/rows.h"
#include "weft/overlap/schedules.h"

namespace bench {

const char* const kOverlapUsage = "weft_bench overlap [--rounds N] [--only TEXT] [--json FILE] files…\n";

namespace {

using at::Tensor;
using weft::comm::ShmTransport;
using weft::kernels::Epilogue;
using weft::kernels::Matrix;

constexpr int kRanks = 2;
constexpr double kSample = 10e-3;  // seconds per sample; a short pass is repeated
constexpr double kSteady = 1.10;   // maximum ratio of the GEMM times before and after a schedule

struct Arguments {
  int rank = 0, rounds = 21;
  std::string store, only, json;
  std::vector<std::string> files;
};

Arguments parse(const std::vector<std::string>& words) {
  Arguments out;
  for (size_t i = 0; i < words.size(); ++i) {
    const auto value = [&] {
      TORCH_CHECK_VALUE(i + 1 < words.size(), kOverlapUsage);
      return words[++i];
    };
    if (words[i] == "--rank") {
      out.rank = std::stoi(value());
    } else if (words[i] == "--store") {
      out.store = value();
    } else if (words[i] == "--rounds") {
      out.rounds = std::stoi(value());
    } else if (words[i] == "--only") {
      out.only = value();
    } else if (words[i] == "--json") {
      out.json = value();
    } else {
      TORCH_CHECK_VALUE(!words[i].starts_with("--"), kOverlapUsage);
      out.files.push_back(words[i]);
    }
  }
  TORCH_CHECK_VALUE(!out.files.empty(), kOverlapUsage);
  return out;
}

void pin_to_core(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  TORCH_CHECK(sched_setaffinity(0, sizeof set, &set) == 0, "cannot pin the process to core ", core);
}

/// All-gathers one number per rank.
std::vector<double> exchange(ShmTransport& transport, double local) {
  const auto block = at::empty({1, 1}, at::kDouble).fill_(local);
  const auto collective = transport.all_gather(block);
  std::vector<double> all(kRanks, local);
  for (int r = 0; r < kRanks; ++r) {
    if (r == transport.rank()) continue;
    collective->wait(r, 1);
    all[r] = collective->incoming(r).item<double>();
  }
  collective->finish();
  return all;
}

/// Seconds per pass of the slowest rank; all ranks start together.
double slowest_rank_seconds(ShmTransport& transport, const std::function<void()>& run, int passes) {
  exchange(transport, 0);
  const double start = now(/*threads=*/0);
  for (int i = 0; i < passes; ++i) run();
  const auto all = exchange(transport, now(/*threads=*/0) - start);
  return *std::max_element(all.begin(), all.end()) / passes;
}

/// A problem of a line: the schedule, the GEMM alone, and the error of the schedule.
struct OverlapProblem {
  std::function<void()> schedule, gemm;
  double error = 0;
};

double error_of(const Tensor& got, const Tensor& want) {
  return (at::linalg_vector_norm(got.to(at::kFloat) - want) / at::linalg_vector_norm(want)).item<double>();
}

Tensor random(at::IntArrayRef sizes, double scale = 1) { return (at::randn(sizes) * scale).to(at::kBFloat16); }

/// y = all_gather(x) Wᵀ.
OverlapProblem all_gather(ShmTransport& transport, const Line& line) {
  const auto t = line.size("t"), k = line.size("k"), n = line.size("n");
  at::manual_seed(0);
  const auto x = random({t, k}), w = random({n, k}, 1 / std::sqrt(k));
  const auto local = x.narrow(0, transport.rank() * t / kRanks, t / kRanks).clone();
  const auto y = at::empty({t, n}, x.options()), alone = at::empty_like(y);
  const auto run = [=, &transport] {
    weft::overlap::all_gather_gemm(transport, local, Matrix(w, true), {.out = y, .b_is_weight = true});
  };
  run();
  return {run, [=] { weft::kernels::gemm(x, Matrix(w, true), {.out = alone, .b_is_weight = true}); },
          error_of(y, at::mm(x.to(at::kFloat), w.to(at::kFloat).t()))};
}

/// y_r = Σ_ranks (x Wᵀ)_r.
OverlapProblem reduce_scatter(ShmTransport& transport, const Line& line) {
  const auto t = line.size("t"), k = line.size("k"), n = line.size("n");
  at::manual_seed(0);
  const auto x = random({t, k * kRanks}), w = random({n, k * kRanks}, 1 / std::sqrt(k));
  const auto xr = x.narrow(1, transport.rank() * k, k).contiguous(),
             wr = w.narrow(1, transport.rank() * k, k).contiguous();
  const auto alone = at::empty({t, n}, x.options()), y = at::empty({t / kRanks, n}, x.options());
  const auto run = [=, &transport] {
    return weft::overlap::gemm_reduce_scatter(transport, xr, Matrix(wr, true), {.out = y, .b_is_weight = true});
  };
  const auto want = at::mm(x.narrow(0, transport.rank() * t / kRanks, t / kRanks).to(at::kFloat), w.to(at::kFloat).t());
  return {[=] { run(); }, [=] { weft::kernels::gemm(xr, Matrix(wr, true), {.out = alone, .b_is_weight = true}); },
          error_of(run(), want)};
}

/// Runs rounds of GEMM, schedule, GEMM; rounds whose GEMM times differ do not count.
Measured measure(ShmTransport& transport, const OverlapProblem& problem, int rounds) {
  slowest_rank_seconds(transport, problem.schedule, 3);
  slowest_rank_seconds(transport, problem.gemm, 3);
  const int passes =
      std::max(1, static_cast<int>(std::lround(kSample / slowest_rank_seconds(transport, problem.gemm, 2))));
  std::vector<double> ratios, controls, schedules, products;
  Measured out;
  for (out.rounds = 0; out.rounds < 8 * rounds && static_cast<int>(ratios.size()) < rounds; ++out.rounds) {
    const double before = slowest_rank_seconds(transport, problem.gemm, passes);
    const double schedule = slowest_rank_seconds(transport, problem.schedule, passes);
    const double after = slowest_rank_seconds(transport, problem.gemm, passes);
    if (std::max(before, after) > kSteady * std::min(before, after)) continue;
    ratios.push_back(2 * schedule / (before + after));
    controls.push_back(after / before);
    schedules.push_back(schedule);
    products.push_back((before + after) / 2);
  }
  out.kept = static_cast<int>(ratios.size());
  if (ratios.empty()) return out;
  const auto [median, low, high] = bootstrap(ratios);
  out.ms = 1e3 * bootstrap(schedules).median;
  out.ratios.push_back({"gemm", median, low, high, 1e3 * bootstrap(products).median});
  out.control = bootstrap(controls).median;
  return out;
}

std::vector<Line> lines_of(const Arguments& arguments) {
  std::vector<Line> lines;
  for (const auto& name : arguments.files) {
    std::ifstream file(name);
    TORCH_CHECK(file, "cannot open ", name);
    for (std::string text; std::getline(file, text);)
      if (text = text.substr(0, text.find('#')); text.find_first_not_of(' ') != std::string::npos)
        if (text.find(arguments.only) != std::string::npos) lines.emplace_back(text);
  }
  return lines;
}

bool run_rank(const Arguments& arguments) {
  pin_to_core(arguments.rank);
  auto store = c10::make_intrusive<c10d::FileStore>(arguments.store, kRanks);
  ShmTransport transport(std::make_shared<weft::comm::HostRendezvous>(weft::comm::HostRendezvous::Options{
      [&store] { return store; }, "bench", arguments.rank, kRanks, std::chrono::seconds(60)}));
  Report report(Method{});
  bool fine = true;
  for (const auto& line : lines_of(arguments)) {
    const Target target(line);
    const auto make = line.kind() == "all_gather" ? all_gather : reduce_scatter;
    const auto problem = make(transport, line);
    line.finish();
    auto measured = measure(transport, problem, arguments.rounds);
    const auto missed = [&] {
      return exchange(transport, measured.kept == 0 || target.missed(measured) ? 1 : 0)[0] != 0;
    };
    if (missed()) measured = measure(transport, problem, arguments.rounds);  // missed only if over the bound twice
    const bool steady = measured.kept > 0;
    fine = fine && steady && !target.missed(measured) && problem.error < 1e-2;
    if (arguments.rank == 0 && problem.error >= 1e-2) std::cout << line.text() << ": WRONG\n";
    if (arguments.rank == 0 && !steady) std::cout << line.text() << ": no round was steady\n" << std::flush;
    if (arguments.rank == 0 && steady) report.add(line, target, measured, {{"y", problem.error, 0}});
    if (arguments.rank == 0 && !arguments.json.empty()) report.write(arguments.json);
  }
  return fine;
}

}  // namespace

int run_overlap(const std::vector<std::string>& words) {
  auto arguments = parse(words);
  at::set_num_threads(1);
  if (arguments.rank > 0) return run_rank(arguments) ? 0 : 1;
  char name[] = "/tmp/weft_bench_XXXXXX";
  TORCH_CHECK(mkdtemp(name), "cannot create a folder in /tmp");
  arguments.store = std::string(name) + "/store";
  auto peer = words;
  peer.insert(peer.begin(), "overlap");
  peer.insert(peer.end(), {"--rank", "1", "--store", arguments.store});
  const auto pid = start_rank(peer);
  const bool fine = run_rank(arguments);
  int status = 0;
  waitpid(pid, &status, 0);
  unlink(arguments.store.c_str());
  rmdir(name);
  return fine && status == 0 ? 0 : 1;
}

}  // namespace bench
