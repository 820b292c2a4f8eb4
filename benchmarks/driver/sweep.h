#pragma once
#include <string>
#include <vector>

namespace bench {

/// weft_bench sweep [--shapes N] [--seed N] [--dtype bf16|fp16|fp32] [--flop N] [--json FILE]: random pipelines and
/// shapes, planned with all rules and without one of the rules used. Returns 1 if a fused plan was slower by more than
/// 2 % twice. With --rule NAME --m N --h N --f N only one shape.
int run_sweep(const std::vector<std::string>& arguments);

}  // namespace bench
