#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace bench {

/// One forward and backward pass of a tiny pipeline, by weft or by one hand-written autograd Function with the same
/// ATen calls. The difference is the cost of the framework.
struct FrameworkProblem {
  std::string name;
  std::function<std::function<void()>()> weft, bare;  // each returns a closure that runs one pass
};

/// five: RMSNorm, BasicLinear, Bias, GELU, BasicLinear. sixteen: ConstantScale × 16. Both fp32, 8×8.
const std::vector<FrameworkProblem>& framework_problems();

}  // namespace bench
