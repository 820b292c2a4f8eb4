// weft_bench framework <problem> <weft|bare>   runs passes of one problem; under callgrind only those after warm-up
// count.
#include <ATen/Parallel.h>
#include <valgrind/callgrind.h>

#include <chrono>
#include <cstring>
#include <iostream>

#include "benchmarks/driver/framework.h"

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
  std::cerr << "no problem is called '" << name << "'\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc == 4 && std::strcmp(argv[1], "framework") == 0)
    return run_framework(argv[2], std::strcmp(argv[3], "bare") == 0);
  std::cerr << "usage: weft_bench framework <five|sixteen> <weft|bare>\n";
  return 2;
}
