#pragma once
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <vector>

#include "weft/fuser/fuser.h"

namespace weft::testing {

inline at::Tensor leaf(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble).requires_grad_(); }

/// Random tensors for the pipeline's parameters.
inline std::vector<at::Tensor> parameters(const fuser::Pipeline& pipeline) {
  std::vector<at::Tensor> list;
  for (const auto& spec : pipeline.params()) list.push_back(leaf(spec.shape));
  return list;
}

inline void expect_close(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.defined(), expected.defined()) << what;
  if (!expected.defined()) return;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(got.allclose(expected, 1e-10, 1e-10))
      << what << " differs by " << (got - expected).abs().max().item<double>();
}

inline std::vector<at::Tensor> grad(const at::Tensor& y, const std::vector<at::Tensor>& inputs, const at::Tensor& dy) {
  return torch::autograd::grad({y}, inputs, {dy}, /*retain_graph=*/true, /*create_graph=*/false, /*allow_unused=*/true);
}

}  // namespace weft::testing
