#pragma once
#include <string>
#include <vector>

namespace bench {

/// weft_bench signals …: latency of a signal between ranks on one host, in µs. Returns the exit status.
int run_signals(const std::vector<std::string>& arguments);
extern const char* const kSignalsUsage;

}  // namespace bench
