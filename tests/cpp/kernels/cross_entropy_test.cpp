// Cross entropy of rows in every tier, against float64; also with the classes split over several partial results.
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/stack.h>

#include <limits>
#include <numeric>

#include "tests/cpp/kernels/compare.h"
#include "weft/kernels/cross_entropy.h"

namespace weft::kernels {
namespace {

constexpr int64_t kIgnored = -100;
const std::vector<int64_t> kClasses{1, 2, 15, 16, 17, 33, 100, 2048, 2049, 5000};

/// The loss of each row in differentiable ATen operations.
at::Tensor plain(const at::Tensor& x, const at::Tensor& targets, const CrossEntropyLoss& loss) {
  const auto ignored = targets.eq(kIgnored);
  const auto log_p = at::log_softmax(x, 1), lse = x.logsumexp(1);
  const auto of_target = log_p.gather(1, targets.masked_fill(ignored, 0).unsqueeze(1)).squeeze(1);
  const auto rows =
      -(of_target * (1 - loss.label_smoothing) + log_p.mean(1) * loss.label_smoothing) + lse.square() * loss.z_loss;
  return rows.masked_fill(ignored, 0);
}

at::Tensor some_targets(int64_t rows, int64_t classes) {
  auto targets = at::randint(classes, {rows}, at::kLong);
  targets.narrow(0, 2, 1).fill_(kIgnored);
  return targets;
}

/// Forward and backward over parts of the classes, given by their numbers of columns.
void check(const at::Tensor& x, const at::Tensor& targets, CrossEntropyLoss loss, const std::vector<int64_t>& columns) {
  const auto leaf = exact(x).detach().requires_grad_(true);
  const auto expected = plain(leaf, targets, loss);
  const auto grad = at::randn({x.size(0)});
  expected.backward(exact(grad));
  const auto for_each_part = [&](const auto& run) {
    std::vector<at::Tensor> results;
    loss.first_class = 0;
    for (const auto count : columns) {
      results.push_back(run(x.narrow(1, loss.first_class, count)));
      loss.first_class += count;
    }
    return results;
  };
  const auto partials =
      for_each_part([&](const at::Tensor& part) { return cross_entropy_partials(part, targets, loss); });
  const auto parts = at::stack(partials);
  const auto out = cross_entropy_forward(parts, targets, loss);
  const auto dx = for_each_part(
      [&](const at::Tensor& part) { return cross_entropy_backward(grad, part, targets, out.statistics, loss); });
  EXPECT_EQ(out.loss.scalar_type(), at::kFloat);
  expect_near(out.loss, expected.detach(), 10);
  expect_near(at::cat(dx, 1), leaf.grad());
  const auto combined = combine_cross_entropy_partials(parts, loss).unsqueeze(0);
  expect_near(cross_entropy_forward(combined, targets, loss).loss, expected.detach(), 12);
}

TEST(KernelsCrossEntropy, MatchesFloat64) {
  for (const auto dtype : kVectorDtypes)
    for (const auto classes : kClasses)
      for (const double smoothing : {0.0, 0.3})
        for (const double z : {0.0, 0.01})
          for (const bool gaps : {false, true})
            check(values({5, classes}, dtype, gaps), some_targets(5, classes),
                  {.classes = classes, .label_smoothing = smoothing, .z_loss = z}, {classes});
}

TEST(KernelsCrossEntropy, PartsOfClassesMatchFloat64) {
  const std::vector<std::vector<int64_t>> parts{{1, 1}, {7, 7, 7}, {33, 33, 33, 33}, {2049, 2049}, {40, 3}, {1, 2, 70}};
  for (const auto dtype : kVectorDtypes)
    for (const auto& columns : parts) {
      const auto classes = std::accumulate(columns.begin(), columns.end(), int64_t{0});
      check(values({6, classes}, dtype), some_targets(6, classes),
            {.classes = classes, .label_smoothing = 0.3, .z_loss = 0.01}, columns);
    }
}

TEST(KernelsCrossEntropy, PartOfMinusInfinityAddsNothing) {
  for (const double smoothing : {0.0, 0.3}) {
    auto x = values({4, 40}, at::kFloat);
    x.narrow(1, 20, 20).fill_(-std::numeric_limits<float>::infinity());
    CrossEntropyLoss loss{.classes = 40, .label_smoothing = smoothing};
    const auto targets = at::randint(20, {4}, at::kLong);
    const auto whole = cross_entropy_forward(cross_entropy_partials(x, targets, loss).unsqueeze(0), targets, loss);
    const auto first = cross_entropy_partials(x.narrow(1, 0, 20), targets, loss);
    loss.first_class = 20;
    const auto second = cross_entropy_partials(x.narrow(1, 20, 20), targets, loss);
    const auto split = cross_entropy_forward(at::stack({first, second}), targets, loss);
    // The order of the sum depends on the number of classes and, in ATen, on the alignment of a row.
    EXPECT_TRUE(at::allclose(split.loss, whole.loss, 1e-6, 1e-6)) << split.loss << whole.loss;
    EXPECT_EQ(split.loss.isinf().all().item<bool>(), smoothing > 0);
  }
}

TEST(KernelsCrossEntropy, TargetsAreChecked) {
  const CrossEntropyLoss loss{.classes = 4};
  EXPECT_NO_THROW(check_targets(at::full({3}, kIgnored, at::kLong), loss));
  EXPECT_NO_THROW(check_targets(at::full({3}, 3, at::kLong), loss));
  for (const int64_t target : {int64_t{-1}, int64_t{4}, std::numeric_limits<int64_t>::max()})
    EXPECT_THROW(check_targets(at::full({3}, target, at::kLong), loss), c10::IndexError);
}

}  // namespace
}  // namespace weft::kernels
