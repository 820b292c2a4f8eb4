#pragma once
#include <string>
#include <vector>

namespace bench {

/// weft_bench overlap …: overlap schedules between two processes on two cores over shared memory, compared with the
/// GEMM alone on both at the same time. Returns the exit status.
int run_overlap(const std::vector<std::string>& arguments);
extern const char* const kOverlapUsage;

}  // namespace bench
