// Trains a norm-MLP block with a residual branch, saves it and loads it again.
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <iostream>
#include <sstream>

#include "weft/nn/sequential.h"
#include "weft/ops/norm.h"

using weft::nn::Linear, weft::nn::Sequential, weft::nn::op;

// y = x + W2 gelu(W1 norm(x) + b1) + b2
static Sequential block(int64_t size) {
  auto fork = op("MakeExtraOutput"), join = op("AddExtraInput");
  fork->set_extra_output_channel(0, "residual", /*output_to_caller=*/false);
  join->set_extra_input_channel(0, "residual");
  return Sequential(fork, op<weft::ops::RMSNorm>({.normalized_shape = {size}}), Linear(size, 4 * size), op("GELU"),
                    Linear(4 * size, size), join);
}

int main() {
  torch::manual_seed(0);
  auto model = block(16);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));

  const auto x = at::randn({256, 16}), target = x.roll(1, -1);
  std::cout << model->explain(x).text() << "\n";
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const auto loss = at::mse_loss(model->forward(x), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }

  std::stringstream file;
  torch::save(model, file);
  auto loaded = block(16);
  torch::load(loaded, file);
  const bool same = loaded->forward(x).equal(model->forward(x));
  std::cout << "loss " << first << " -> " << last << ", loaded model " << (same ? "agrees" : "differs") << "\n";
  return same && last < first / 10 ? 0 : 1;
}
