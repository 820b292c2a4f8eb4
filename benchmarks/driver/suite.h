#pragma once
#include <string>
#include <vector>

namespace bench {

/// weft_bench suite …: checks or times problems given as lines. See `kSuiteUsage`. Returns the exit status.
int run_suite(const std::vector<std::string>& arguments);
extern const char* const kSuiteUsage;

}  // namespace bench
