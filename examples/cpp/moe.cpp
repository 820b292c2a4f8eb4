// A mixture of experts in one process: a router sends each token to two of eight experts, which run as one pipeline.
#include <ATen/ops/argsort.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/index_add.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cmath>
#include <iostream>

#include "weft/nn/sequential.h"
#include "weft/ops/grouped_linear.h"

using weft::nn::Linear, weft::nn::Sequential, weft::nn::op, weft::ops::GroupedLinear;

static constexpr int64_t kWidth = 16, kHidden = 32, kExperts = 8, kTopK = 2, kTokens = 256;

// y = Σ_experts p·expert(x) over the selected experts, expert(x) = W2 swiglu(W1 x)
struct MixtureOfExperts : torch::nn::Module {
  Linear router{weft::nn::LinearOptions{.in_features = kWidth, .out_features = kExperts, .bias = false}};
  Sequential experts{layer(kWidth, 2 * kHidden), op("ScaledSwiGLU"), layer(kHidden, kWidth)};

  MixtureOfExperts() {
    register_module("router", router);
    register_module("experts", experts);
  }

  // One grouped weight [experts, out, in].
  static weft::nn::Operation layer(int64_t in, int64_t out) {
    return op<GroupedLinear>(
        {.num_groups = kExperts, .in_features = in, .out_features = out, .bias = false, .single_grouped_weight = true});
  }

  struct Result {
    at::Tensor y, probs, load;
  };
  Result forward(const at::Tensor& x) {
    const auto probs = at::softmax(router->forward(x), -1);
    const auto [weight, expert] = at::topk(probs, kTopK);
    const auto order = at::argsort(expert.flatten(), /*stable=*/true);  // rows sorted by expert
    const auto token = order.floor_divide(kTopK);
    const auto load = at::bincount(expert.flatten(), {}, kExperts);
    const auto rows =
        experts->forward_extra(x.index_select(0, token), {load, weight.flatten().index_select(0, order), load})[0];
    return {at::index_add(at::zeros_like(x), 0, token, rows), probs, load};
  }
};

int main() {
  torch::manual_seed(0);
  // Tokens of eight kinds, each with a separate linear map to learn.
  const auto centers = 2 * at::randn({8, kWidth});
  const auto maps = at::randn({8, kWidth, kWidth}) / std::sqrt(static_cast<double>(kWidth));
  MixtureOfExperts model;
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(5e-3));

  double first = 0, last = 0;
  at::Tensor load;
  for (int step = 0; step < 150; ++step) {
    const auto kind = at::randint(8, {kTokens}, at::kLong);
    const auto x = centers.index_select(0, kind) + 0.5 * at::randn({kTokens, kWidth});
    const auto target = at::einsum("tj,tij->ti", {x, maps.index_select(0, kind)});
    const auto result = model.forward(x);
    const auto share = result.load / static_cast<double>(kTokens * kTopK);
    const auto balance = kExperts * (share * result.probs.mean(0)).sum();  // small if the load is even
    const auto loss = at::mse_loss(result.y, target) + 0.1 * balance;
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
    load = result.load;
  }
  std::cout << "loss " << first << " -> " << last << "\ntokens per expert";
  for (int64_t e = 0; e < kExperts; ++e) std::cout << " " << load[e].item<int64_t>();
  std::cout << "\n";
  return last < 0.2 * first ? 0 : 1;
}
