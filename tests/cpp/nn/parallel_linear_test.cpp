// Tensor-parallel linears, with threads as ranks, against one process in float64: values and all gradients.
#include <ATen/ops/linear.h>

#include "tests/cpp/fuser/testing.h"
#include "tests/cpp/thread_ranks.h"
#include "weft/nn/sequential.h"
#include "weft/ops/norm.h"

namespace weft::nn {
namespace {

using ops::ParallelMode;
using testing::expect_close;
using testing::grad;
using testing::leaf;
using testing::ThreadRanks;

constexpr int64_t kIn = 12, kOut = 24, kRows = 12;
enum class BiasKind { none, own, replicated };

struct Case {
  ParallelMode mode;
  bool sequence_parallel;
  BiasKind bias;
  int ranks;
  std::vector<int64_t> leading;
  std::optional<bool> overlap = false;

  std::string text() const {
    return std::string(mode == ParallelMode::column ? "column" : "row") + (sequence_parallel ? ", sequence" : "") +
           ", bias " + std::to_string(static_cast<int>(bias)) + ", " + std::to_string(ranks) + " ranks, " +
           std::to_string(leading.size() + 1) + "-D" + (overlap ? ", plain" : "");
  }
};

std::vector<Case> cases() {
  std::vector<Case> list;
  for (const auto mode : {ParallelMode::column, ParallelMode::row})
    for (const bool sequence : {false, true})
      for (const auto bias : {BiasKind::none, BiasKind::own, BiasKind::replicated})
        for (const int ranks : {1, 2, 3, 4}) {
          list.push_back({mode, sequence, bias, ranks, {kRows}, /*overlap=*/std::nullopt});
          for (const auto& leading : {std::vector<int64_t>{kRows}, {kRows, 2}, {0}})
            list.push_back({mode, sequence, bias, ranks, leading, /*overlap=*/false});
        }
  return list;
}

/// One group per size, created once, because transports measure their costs when they are created.
const ThreadRanks& group_of(int ranks) {
  static std::map<int, ThreadRanks> groups;
  return groups.try_emplace(ranks, ranks).first->second;
}

/// The unsharded layer in one process.
struct Unsharded {
  at::Tensor x, w, y, dy;
  std::vector<at::Tensor> biases;  // their sum is the bias
  std::vector<at::Tensor> grads;   // of x, w, bias

  explicit Unsharded(const Case& c) {
    auto sizes = c.leading;
    sizes.push_back(kIn);
    x = leaf(sizes);
    w = leaf({kOut, kIn});
    const bool sum = c.mode == ParallelMode::row && c.bias == BiasKind::own;
    at::Tensor b;
    if (c.bias != BiasKind::none) {
      for (int r = 0; r < (sum ? c.ranks : 1); ++r) biases.push_back(leaf({kOut}).detach());
      b = at::stack(biases).sum(0).requires_grad_();
    }
    y = at::linear(x, w, b);
    dy = at::randn(y.sizes(), at::kDouble);
    grads = b.defined() ? grad(y, {x, w, b}, dy) : grad(y, {x, w}, dy);
  }
};

/// This rank's shards of the tensors of the unsharded layer.
struct Shard {
  const Case& c;
  int rank;
  bool column() const { return c.mode == ParallelMode::column; }
  at::Tensor chunk(const at::Tensor& t, int64_t dim) const { return t.chunk(c.ranks, dim)[t.size(dim) ? rank : 0]; }
  at::Tensor local_rows(const at::Tensor& t) const { return c.sequence_parallel ? chunk(t, 0) : t; }

  at::Tensor input(const at::Tensor& x) const { return column() ? local_rows(x) : chunk(x, -1); }
  at::Tensor output(const at::Tensor& y) const { return column() ? chunk(y, -1) : local_rows(y); }
  at::Tensor weight(const at::Tensor& w) const { return chunk(w, column() ? 0 : 1); }
  at::Tensor bias_value(const std::vector<at::Tensor>& biases) const {
    return column() ? chunk(biases[0], 0) : biases[biases.size() > 1 ? rank : 0];
  }
  at::Tensor bias_gradient(const at::Tensor& db) const { return column() ? chunk(db, 0) : db; }
};

void run_rank(const Case& c, const Unsharded& unsharded, int rank, Fusible& layer) {
  const Shard shard{c, rank};
  auto params = layer.op_parameters();
  params[0].set_data(shard.weight(unsharded.w).detach().clone());
  if (params.size() > 1) params[1].set_data(shard.bias_value(unsharded.biases).clone());
  const auto x = shard.input(unsharded.x).detach().clone().requires_grad_();
  const auto y = layer.forward(x);
  expect_close(y, shard.output(unsharded.y), c.text() + ": y");
  std::vector<at::Tensor> inputs{x, params[0]};
  if (params.size() > 1) inputs.push_back(params[1]);
  const auto grads = grad(y, inputs, shard.output(unsharded.dy).clone());
  expect_close(grads[0], shard.input(unsharded.grads[0]), c.text() + ": dx");
  expect_close(grads[1], shard.weight(unsharded.grads[1]), c.text() + ": dw");
  if (params.size() > 1) expect_close(grads[2], shard.bias_gradient(unsharded.grads[2]), c.text() + ": db");
}

TEST(ParallelLinear, MatchesOneProcess) {
  for (const auto& c : cases()) {
    const Unsharded unsharded(c);
    group_of(c.ranks).run([&](int rank, const std::string& group) {
      Linear layer(LinearOptions{.in_features = kIn,
                                 .out_features = kOut,
                                 .bias = c.bias != BiasKind::none,
                                 .dtype = at::kDouble,
                                 .tensor_parallel_mode = c.mode,
                                 .tensor_parallel_group = group,
                                 .sequence_parallel = c.sequence_parallel,
                                 .replicated_bias = c.bias == BiasKind::replicated,
                                 .overlap = c.overlap});
      run_rank(c, unsharded, rank, *layer);
    });
  }
}

ops::BasicLinear::Options basic(const Case& c, const std::string& group) {
  return {.in_features = kIn,
          .out_features = kOut,
          .dtype = at::kDouble,
          .tensor_parallel_mode = c.mode,
          .tensor_parallel_group = group,
          .sequence_parallel = c.sequence_parallel,
          .overlap = c.overlap};
}

TEST(ParallelLinear, BasicLinearCommunicates) {
  for (const auto& c : cases()) {
    if (c.bias != BiasKind::none) continue;
    const Unsharded unsharded(c);
    group_of(c.ranks).run([&](int rank, const std::string& group) {
      auto layer = op<ops::BasicLinear>(basic(c, group));
      run_rank(c, unsharded, rank, *layer);
    });
  }
}

/// The number of collectives that forward and backward of a linear start. The tensors are small: one message each.
std::pair<int64_t, int64_t> count_collectives(const Case& c, bool train_weight, bool input_needs_grad) {
  const ThreadRanks ranks(c.ranks);
  const Unsharded unsharded(c);
  std::pair<int64_t, int64_t> count;
  ranks.run([&](int rank, const std::string& group) {
    auto layer = op<ops::BasicLinear>(basic(c, group));
    layer->parameters()[0].requires_grad_(train_weight);
    auto x = Shard{c, rank}.input(unsharded.x).detach().clone().requires_grad_(input_needs_grad);
    const auto y = layer->forward(x);
    const auto forward = ranks.backend(rank).started();
    y.sum().backward();
    if (rank == 0) count = {forward, ranks.backend(rank).started() - forward};
  });
  return count;
}

TEST(ParallelLinear, CommunicatesOnlyForNeededGradients) {
  using Counts = std::pair<int64_t, int64_t>;
  const Case column{ParallelMode::column, true, BiasKind::none, 2, {kRows}};
  EXPECT_EQ(count_collectives(column, true, true), Counts(1, 2));   // all-gather of x, reduce-scatter of dx
  EXPECT_EQ(count_collectives(column, false, true), Counts(1, 1));  // the weight is frozen: x is not gathered
  EXPECT_EQ(count_collectives(column, true, false), Counts(1, 1));  // dx is not needed
  const Case row{ParallelMode::row, true, BiasKind::none, 2, {kRows}};
  EXPECT_EQ(count_collectives(row, true, true), Counts(1, 1));  // one all-gather of dy for both GEMMs
  EXPECT_EQ(count_collectives(row, false, true), Counts(1, 1));
}

TEST(ParallelLinear, SavesOnlyLocalRows) {
  const Case c{ParallelMode::column, true, BiasKind::none, 2, {kRows}};
  const ThreadRanks ranks(2);
  ranks.run([&](int, const std::string& group) {
    auto layer = op<ops::BasicLinear>(basic(c, group));
    const auto plan = layer->explain(at::randn({kRows / 2, kIn}, at::kDouble).requires_grad_());
    EXPECT_NE(plan.text().find("[6, 12]"), std::string::npos) << plan.text();
    EXPECT_EQ(plan.text().find("[12, 12]"), std::string::npos) << plan.text();
  });
}

TEST(ParallelLinear, InitUsesGlobalFanIn) {
  const ThreadRanks ranks(4);
  for (const auto mode : {ParallelMode::column, ParallelMode::row}) {
    ranks.run([&](int, const std::string& group) {
      const Linear layer(LinearOptions{
          .in_features = 400, .out_features = 400, .tensor_parallel_mode = mode, .tensor_parallel_group = group});
      const auto largest = layer->parameters()[0].abs().max().item<double>();
      EXPECT_LE(largest, 0.05001);
      EXPECT_GT(largest, 0.049);
    });
  }
}

TEST(ParallelLinear, RejectsIndivisibleFeatures) {
  const ThreadRanks ranks(3);
  const auto& group = ranks.name(0);
  const auto text = [&](LinearOptions options) {
    options.tensor_parallel_group = group;
    try {
      Linear layer(std::move(options));
    } catch (const c10::ValueError& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  EXPECT_NE(text({.in_features = 6, .out_features = 8, .tensor_parallel_mode = ParallelMode::column})
                .find("out_features 8 does not divide over 3 ranks"),
            std::string::npos);
  EXPECT_NE(text({.in_features = 8, .out_features = 6, .tensor_parallel_mode = ParallelMode::row})
                .find("in_features 8 does not divide over 3 ranks"),
            std::string::npos);
  EXPECT_THROW(op<ops::BasicLinear>({.in_features = 6, .out_features = 6, .tensor_parallel_mode = ParallelMode::row}),
               c10::ValueError);  // no process group
}

TEST(ParallelLinear, RejectsSizeThatIsNotThatOfGroup) {
  const ThreadRanks ranks(2);
  for (const auto mode : {ParallelMode::column, ParallelMode::row}) {
    Linear layer(LinearOptions{.in_features = kIn,
                               .out_features = kOut,
                               .dtype = at::kDouble,
                               .tensor_parallel_mode = mode,
                               .tensor_parallel_group = ranks.name(0),
                               .tensor_parallel_size = 4,
                               .sequence_parallel = true,
                               .overlap = false});
    std::string text;
    try {
      layer->forward(at::randn({kRows, mode == ParallelMode::row ? kIn / 4 : kIn}, at::kDouble));
    } catch (const c10::ValueError& error) {
      text = error.what_without_backtrace();
    }
    EXPECT_NE(text.find("has 2 ranks, expected 4"), std::string::npos) << text;
  }
}

/// Norm, column linear, activation, row linear, and the residual.
Sequential block(const std::string& activation, const std::optional<std::string>& group, bool sequence_parallel) {
  LinearOptions up{.in_features = kIn, .out_features = kOut, .dtype = at::kDouble};
  LinearOptions down{.in_features = kOut, .out_features = kIn, .dtype = at::kDouble};
  if (group) {
    up.tensor_parallel_mode = ParallelMode::column;
    down.tensor_parallel_mode = ParallelMode::row;
    up.tensor_parallel_group = down.tensor_parallel_group = group;
    up.sequence_parallel = down.sequence_parallel = sequence_parallel;
    down.replicated_bias = true;
  }
  auto fork = op("MakeExtraOutput"), join = op("AddExtraInput");
  fork->set_extra_output_channel(0, "r", /*output_to_caller=*/false);
  join->set_extra_input_channel(0, "r");
  return Sequential(fork, op<ops::RMSNorm>({.normalized_shape = {kIn}, .dtype = at::kDouble}), Linear(up),
                    op(activation), Linear(down), join);
}

TEST(ParallelLinear, FusedBlockMatchesOneProcess) {
  for (const bool sequence : {false, true}) {
    for (const int p : {2, 3}) {
      for (const std::string activation : {"GELU", "SReLU"}) {
        auto unsharded = block(activation, {}, false);
        for (auto& param : unsharded->parameters()) param.data().uniform_(-1, 1);
        const auto x = leaf({kRows, kIn}), y = unsharded->forward(x), dy = at::randn({kRows, kIn}, at::kDouble);
        auto inputs = unsharded->op_parameters();  // weights: norm, up, up bias, down, down bias
        inputs.insert(inputs.begin(), x);
        const auto expected = grad(y, inputs, dy);
        std::vector<at::Tensor> norm_grads(p);
        group_of(p).run([&](int rank, const std::string& group) {
          const auto local = [&](const at::Tensor& t) { return sequence ? t.chunk(p)[rank] : t; };
          const auto chunk = [&](const at::Tensor& t, int64_t dim) { return t.chunk(p, dim)[rank]; };
          auto model = block(activation, group, sequence);
          auto params = model->op_parameters();
          const auto values = unsharded->op_parameters();
          params[0].set_data(values[0].detach().clone());
          params[1].set_data(chunk(values[1].detach(), 0).clone());
          params[2].set_data(chunk(values[2].detach(), 0).clone());
          params[3].set_data(chunk(values[3].detach(), 1).clone());
          params[4].set_data(values[4].detach().clone());
          const auto input = local(x).detach().clone().requires_grad_();
          const auto out = model->forward(input);
          expect_close(out, local(y), "y");
          params.insert(params.begin(), input);
          const auto got = grad(out, params, local(dy).clone());
          expect_close(got[0], local(expected[0]), "dx");
          norm_grads[rank] = got[1];
          expect_close(got[2], chunk(expected[2], 0), "dw up");
          expect_close(got[3], chunk(expected[3], 0), "db up");
          expect_close(got[4], chunk(expected[4], 1), "dw down");
          expect_close(got[5], expected[5], "db down");
        });
        // With sequence parallelism each rank's norm gradient covers its own rows; the training loop reduces them.
        expect_close(sequence ? at::stack(norm_grads).sum(0) : norm_grads[0], expected[1], "dw norm");
      }
    }
  }
}

}  // namespace
}  // namespace weft::nn
