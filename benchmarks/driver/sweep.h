#pragma once
#include <string>
#include <vector>

namespace bench {

/// weft_bench sweep [--shapes N] [--seed N] [--dtype bf16|fp16|fp32] [--flop N] [--json FILE]: random pipelines and
/// shapes, planned with all rules and without one of those that were used. Returns 1 if the fused plan was slower by
/// more than 2 %, twice. With --rule NAME --m N --h N --f N one shape only.
int run_sweep(const std::vector<std::string>& arguments);

}  // namespace bench
