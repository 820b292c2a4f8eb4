// weft_bench framework <problem> <weft|bare>   runs passes of one problem; callgrind counts those after warm-up
// weft_bench suite --check|--time …            problems as lines: checks values and gradients, or times them
// weft_bench sweep …                           random shapes, with and without one fusion rule
// weft_bench overlap …                         overlap schedules between two processes, compared with the GEMM alone
// weft_bench signals [ranks…]                  latency of signals between ranks on one host
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <valgrind/callgrind.h>

#include <chrono>
#include <iostream>

#include "benchmarks/driver/framework.h"
#include "benchmarks/driver/overlap.h"
#include "benchmarks/driver/signals.h"
#include "benchmarks/driver/suite.h"
#include "benchmarks/driver/sweep.h"

namespace {

constexpr int kWarmUp = 50, kPasses = 200;

int run_framework(const std::string& name, bool bare) {
  for (const auto& problem : bench::framework_problems()) {
    if (problem.name != name) continue;
    const auto pass = (bare ? problem.bare : problem.weft)();
    for (int i = 0; i < kWarmUp; ++i) pass();
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kPasses; ++i) pass();
    const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
    CALLGRIND_DUMP_STATS;
    CALLGRIND_STOP_INSTRUMENTATION;
    std::cout << "passes " << kPasses << " us_per_pass " << spent.count() / kPasses << "\n";
    return 0;
  }
  std::cerr << "unknown problem '" << name << "'\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string what = words.empty() ? "" : words[0];
  if (what == "framework" && words.size() == 3) return run_framework(words[1], words[2] == "bare");
  try {
    if (what == "suite") return bench::run_suite({words.begin() + 1, words.end()});
    if (what == "sweep") return bench::run_sweep({words.begin() + 1, words.end()});
    if (what == "overlap") return bench::run_overlap({words.begin() + 1, words.end()});
    if (what == "signals") return bench::run_signals({words.begin() + 1, words.end()});
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
  std::cerr << "usage: weft_bench framework <five|sixteen> <weft|bare>\n"
            << "       " << bench::kSuiteUsage
            << "       weft_bench sweep [--shapes N] [--seed N] [--dtype bf16|fp16|fp32] [--flop N] [--json FILE]\n"
            << "       " << bench::kOverlapUsage << "       " << bench::kSignalsUsage;
  return 2;
}
