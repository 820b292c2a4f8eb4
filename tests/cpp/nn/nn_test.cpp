#include <ATen/TensorOperators.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <barrier>
#include <sstream>
#include <thread>

#include "weft/nn/sequential.h"
#include "weft/ops/norm.h"
#include "weft/ops/registry.h"
#include "weft/quant/standard_recipes.h"

namespace weft::nn {
namespace {

Sequential mlp() {
  return Sequential(op<ops::RMSNorm>({.normalized_shape = {4}}), Linear(4, 8), op("GELU"), Linear(8, 2));
}

TEST(Nn, SequentialIsOnePipeline) {
  auto model = mlp();
  EXPECT_EQ(model->named_parameters().keys(),
            (std::vector<std::string>{"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}));
  const auto plan = model->explain(at::randn({3, 4}).requires_grad_());
  EXPECT_EQ(plan.ops.size(), 6);
  EXPECT_EQ(plan.forward.size(), 1) << plan.text();
}

TEST(Nn, TrainsWithTorchOptimizer) {
  auto model = mlp();
  torch::optim::SGD sgd(model->parameters(), 0.05);
  const auto x = at::randn({32, 4}), target = x.narrow(1, 0, 2) * 2;
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    sgd.zero_grad();
    auto loss = at::mse_loss(model->forward(x), target);
    loss.backward();
    sgd.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  EXPECT_LT(last, 0.5 * first);
}

TEST(Nn, RecipesQuantizeLinears) {
  auto linear = Linear(64, 32);
  const auto x = at::randn({16, 64}).requires_grad_();
  const auto plain = linear->forward(x);
  at::Tensor y;
  {
    const quant::Autocast region(quant::MXFP8BlockScaling{}.recipe());
    y = linear->forward(x);
  }
  const auto error = (y - plain).norm().item<double>() / plain.norm().item<double>();
  EXPECT_GT(error, 1e-3);
  EXPECT_LT(error, 0.08);
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_TRUE(linear->forward(x).equal(plain));
}

TEST(Nn, SavesLoadsAndClones) {
  auto model = mlp(), other = mlp();
  std::stringstream file;
  torch::save(model, file);
  torch::load(other, file);
  const auto x = at::randn({3, 4});
  EXPECT_TRUE(other->forward(x).equal(model->forward(x)));
  const auto copy = std::dynamic_pointer_cast<SequentialImpl>(model.ptr()->clone());
  EXPECT_TRUE(copy->forward(x).equal(model->forward(x)));
  copy->parameters()[1].data().fill_(0);
  EXPECT_FALSE(copy->forward(x).equal(model->forward(x))) << "the clone shares parameters with the model";
}

TEST(Nn, WorksInsideTorchSequential) {
  torch::nn::Sequential model(torch::nn::Linear(4, 4), op("SiLU"), Linear(4, 2));
  EXPECT_EQ(model->forward(at::randn({3, 4})).size(1), 2);
}

TEST(Nn, EvalReachesDropout) {
  Sequential model(op("Identity"), Operation(ops::op_type("Dropout").make({{"p", 0.5}})));
  const auto x = at::randn({64, 64});
  EXPECT_FALSE(model->forward(x).equal(x));
  model->eval();
  EXPECT_TRUE(model->forward(x).equal(x));
}

TEST(Nn, ResidualByChannel) {
  auto fork = op("MakeExtraOutput"), join = op("AddExtraInput");
  fork->set_extra_output_channel(0, "r", /*output_to_caller=*/false);
  join->set_extra_input_channel(0, "r");
  Sequential model(fork, Linear(4, 4), join);
  const auto x = at::randn({3, 4});
  EXPECT_TRUE(model->forward(x).allclose((*model)[1]->forward(x) + x));
}

TEST(Nn, FirstCallsMayComeFromTwoThreads) {
  for (int i = 0; i < 300; ++i) {
    auto module = op<ops::RMSNorm>({.normalized_shape = {4}});
    std::barrier start(2);
    const auto call = [&] {
      start.arrive_and_wait();
      module->forward(at::ones({2, 4}));
    };
    std::thread other(call);
    call();
    other.join();
  }
}

TEST(Nn, DtypeFollowsTo) {
  auto model = mlp();
  model->to(at::kDouble);
  EXPECT_EQ(model->forward(at::randn({3, 4}, at::kDouble)).scalar_type(), at::kDouble);
}

}  // namespace
}  // namespace weft::nn
