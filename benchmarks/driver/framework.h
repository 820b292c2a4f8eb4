#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace bench {

/// One forward and backward pass of a tiny pipeline, through weft or through one autograd Function written by hand with
/// the same ATen calls. What remains between the two is the cost of the framework.
struct FrameworkProblem {
  std::string name;
  std::function<std::function<void()>()> weft, bare;  // each makes a closure that runs one pass
};

/// five: RMSNorm, BasicLinear, Bias, GELU, BasicLinear. sixteen: ConstantScale × 16. Both fp32, 8×8.
const std::vector<FrameworkProblem>& framework_problems();

}  // namespace bench
