// A pipeline as text, with forward and backward as pure functions: no object lives between the two calls.
#include <ATen/ops/allclose.h>
#include <ATen/ops/randn.h>
#include <torch/utils.h>

#include <iostream>

#include "weft/fuser/call_validation.h"
#include "weft/fuser/functional.h"

using namespace weft;

int main() {
  torch::manual_seed(0);
  const auto pipeline = fuser::Pipeline::parse(
      R"(MakeExtraOutput() >>"skip"; BasicLinear(in_features=8, out_features=8); Bias(size=8); SiLU(); )"
      R"(AddExtraInput() <"skip")");

  const auto x = at::randn({4, 8}).requires_grad_();
  const std::vector<at::Tensor> params{at::randn({8, 8}).requires_grad_(), at::randn({8}).requires_grad_()};

  // The text also describes the call: devices, dtypes and which tensors require grad.
  const auto text = fuser::describe(pipeline, fuser::make_plan_key(pipeline, x, params, {}, /*eval_mask=*/0));
  std::cout << text << "\n";

  // Without autograd: saved tensors in, gradients out.
  const auto out = fuser::forward(x, params, {}, text);
  const auto dy = at::randn({4, 8});
  const auto grads = fuser::backward({dy}, out.saved, x, params, {}, text);

  // The same pipeline as a node of the autograd graph.
  fuser::Fuser run(pipeline);
  const auto y = run(x, params, {})[0];
  y.backward(dy);

  bool same = at::allclose(y, out.outputs[0]) && at::allclose(x.grad(), grads[0]);
  for (size_t i = 0; i < params.size(); ++i) same &= at::allclose(params[i].grad(), grads[1 + i]);
  std::cout << (same ? "both results agree" : "the results differ") << "\n";
  return same ? 0 : 1;
}
