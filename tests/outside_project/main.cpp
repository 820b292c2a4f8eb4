// Trains a small MLP to copy a fixed random one. Exits non-zero unless the loss falls to a tenth.
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <cstdio>

#include "weft/nn/sequential.h"
#include "weft/ops/norm.h"

using weft::nn::Linear, weft::nn::Sequential, weft::nn::op;

static Sequential mlp() {
  return Sequential(op<weft::ops::RMSNorm>({.normalized_shape = {16}}), Linear(16, 64), op("GELU"), Linear(64, 4));
}

int main() {
  torch::manual_seed(0);
  auto teacher = mlp(), student = mlp();
  torch::optim::Adam adam(student->parameters(), torch::optim::AdamOptions(1e-2));
  double first = 0, last = 0;
  for (int step = 0; step < 300; ++step) {
    const auto x = at::randn({128, 16});
    at::Tensor y;
    {
      const torch::NoGradGuard no_grad;
      y = teacher->forward(x);
    }
    const auto loss = at::mse_loss(student->forward(x), y);
    adam.zero_grad();
    loss.backward();
    adam.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  std::printf("outside: loss %.4f -> %.6f\n", first, last);
  return last < first / 10 ? 0 : 1;
}
