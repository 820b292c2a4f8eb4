// Grouped operations read split sizes only inside kernels, in forward, backward and backward_dw. Checked in three ways:
// on the meta device, with splits on a page that is readable only while a kernel runs, and by replaying recorded
// kernels on other splits. Each check must fail for an operation that reads the splits on the host.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/autograd.h>

#include "weft/core/dispatch_keys.h"
#include "weft/fuser/fuser.h"
#include "weft/kernels/launch.h"
#include "weft/ops/grouped_linear.h"
#include "weft/ops/scaled_activation.h"
#include "weft/ops/wgrad_attrs.h"

namespace weft {
namespace {

using ops::GroupedLinear;

/// A grouped linear that reads its splits on the host.
class Peeking final : public ops::BasicOp {
 public:
  explicit Peeking(GroupedLinear::Options options) : inner_(options) {}
  std::string_view name() const override { return "Peeking"; }
  std::vector<FieldValue> fields() const override { return inner_.fields(); }
  std::vector<ops::ParamSpec> params() const override { return inner_.params(); }
  int extra_inputs() const override { return inner_.extra_inputs(); }
  std::vector<std::string> saved_names() const override { return inner_.saved_names(); }
  ops::Inferred infer(const ops::OpPlan& plan, const ops::Spec& x, c10::ArrayRef<ops::Spec> extra,
                      c10::ArrayRef<ops::Spec> params) const override {
    return inner_.infer(plan, x, extra, params);
  }
  at::Tensor forward(ops::OpContext& ctx, const at::Tensor& x, ops::Params params) const override {
    const auto largest = ctx.extra_input(0).max().item<int64_t>();
    return inner_.forward(ctx, x * static_cast<double>(largest), params);
  }
  at::Tensor backward(ops::OpContext& ctx, const at::Tensor& dy, ops::Params params) const override {
    return inner_.backward(ctx, dy, params);
  }

 private:
  GroupedLinear inner_;
};

struct Case {
  const char* name;
  bool mlp = false, single = false, accumulate = false, delay = false, peek = false;
};
void PrintTo(const Case& c, std::ostream* stream) { *stream << c.name; }

constexpr int64_t kGroups = 3, kRows = 40, kIn = 16, kOut = 24;

/// A pipeline and its tensors; `step` runs forward, backward and backward_dw.
struct Trial {
  const Case& c;
  std::vector<fuser::Stage> stages;
  std::shared_ptr<fuser::Fuser> pipeline;
  std::vector<at::Tensor> params;
  at::Tensor x, probs, dy;

  Trial(const Case& tried, at::ScalarType dtype, at::Device device = at::kCPU) : c(tried) {
    at::manual_seed(7);
    add_linear(kIn, c.mlp ? 2 * kOut : kOut, dtype);
    if (c.mlp) {
      stages.push_back({.op = std::make_shared<ops::ScaledSwiGLU>(ops::ScaledSwiGLU::Options{}), .in = {""}});
      add_linear(kOut, kOut, dtype);
    }
    pipeline = std::make_shared<fuser::Fuser>(fuser::Pipeline(stages));
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    for (const auto& spec : pipeline->pipeline().params()) {
      params.push_back(at::randn(spec.shape, options).requires_grad_());
      if (c.accumulate && spec.supports_main_grad)
        ops::wgrad_attrs(params.back()).main_grad = at::zeros(spec.shape, options.dtype(at::kFloat));
    }
    x = at::randn({kRows, kIn}, options).requires_grad_();
    probs = at::rand({kRows}, at::TensorOptions().device(device)).requires_grad_();
    dy = at::randn({kRows, kOut}, options);
  }
  void add_linear(int64_t in, int64_t out, at::ScalarType dtype) {
    const GroupedLinear::Options options{.num_groups = kGroups,
                                         .in_features = in,
                                         .out_features = out,
                                         .dtype = dtype,
                                         .accumulate_into_main_grad = c.accumulate,
                                         .single_grouped_weight = c.single,
                                         .single_grouped_bias = c.single,
                                         .delay_wgrad_compute = c.delay};
    ops::OpPtr op = std::make_shared<GroupedLinear>(options);
    if (c.peek) op = std::make_shared<Peeking>(options);
    stages.push_back({.op = std::move(op), .in = {""}});
  }

  /// Returns y, all gradients and the main_grads.
  std::vector<at::Tensor> step(const at::Tensor& splits) {
    fuser::Tensors extras{splits};
    if (c.mlp) extras = {splits, probs, splits};
    auto y = (*pipeline)(x, params, extras)[0];
    std::vector<at::Tensor> inputs{x}, results{y.detach()};
    if (c.mlp) inputs.push_back(probs);
    inputs.insert(inputs.end(), params.begin(), params.end());
    // autograd::grad returns the kernels' own buffers; .grad would be a copy, since a recording references them.
    for (auto& g : torch::autograd::grad({y}, inputs, {dy}, std::nullopt, false, /*allow_unused=*/true))
      if (g.defined()) results.push_back(std::move(g));
    backward_dw();
    for (const auto& p : params) {
      if (p.grad().defined()) results.push_back(p.grad());
      if (const auto* attrs = ops::find_wgrad_attrs(p); attrs && attrs->main_grad.defined())
        results.push_back(attrs->main_grad);
    }
    return results;
  }
  void backward_dw() {
    const BelowAutograd below;
    size_t offset = 0;
    for (const auto& stage : stages) {
      const auto count = stage.op->params().size();
      stage.op->backward_dw({params.data() + offset, count});
      offset += count;
    }
  }
};

class GraphSafety : public ::testing::TestWithParam<Case> {};

TEST_P(GraphSafety, RunsOnMetaDevice) {
  Trial trial(GetParam(), at::kBFloat16, at::kMeta);
  for (const auto& t : trial.step(at::empty({kGroups}, at::TensorOptions().dtype(at::kLong).device(at::kMeta))))
    EXPECT_TRUE(t.is_meta());
}

/// Splits on a separate page that is readable only while a kernel runs.
class ProtectedPage final : public kernels::LaunchHook {
 public:
  explicit ProtectedPage(const std::vector<int64_t>& splits) {
    page_ = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::copy(splits.begin(), splits.end(), static_cast<int64_t*>(page_));
    tensor = at::from_blob(page_, {static_cast<int64_t>(splits.size())}, at::kLong);
    mprotect(page_, kBytes, PROT_NONE);
    before_ = kernels::set_launch_hook(this);
  }
  ~ProtectedPage() override {
    kernels::set_launch_hook(before_);
    munmap(page_, kBytes);
  }
  void run(kernels::Launch step) override {
    mprotect(page_, kBytes, PROT_READ);
    step();
    mprotect(page_, kBytes, PROT_NONE);
  }

  at::Tensor tensor;

 private:
  static constexpr size_t kBytes = 4096;
  void* page_;
  kernels::LaunchHook* before_;
};

TEST_P(GraphSafety, OnlyKernelsReadSplits) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<at::Tensor> expected, got;
    {
      Trial plain(GetParam(), dtype);
      expected = plain.step(at::tensor({int64_t{11}, int64_t{0}, int64_t{25}}));
    }
    Trial trial(GetParam(), dtype);
    ProtectedPage page({11, 0, 25});
    got = trial.step(page.tensor);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << "result " << i;
  }
}

/// Records a step, changes splits and x in place and replays it. Returns the indices of the results that differ from
/// those of a new step.
std::vector<size_t> replay_differences(const Case& c, at::ScalarType dtype) {
  auto splits = at::tensor({int64_t{11}, int64_t{0}, int64_t{25}});
  const auto other = at::tensor({int64_t{3}, int64_t{30}, int64_t{7}});
  Trial trial(c, dtype);
  const auto x = at::randn({kRows, kIn}, trial.x.options().requires_grad(false));
  std::vector<at::Tensor> results;
  kernels::LaunchRecording recording;
  results = trial.step(splits);
  recording.stop();
  splits.copy_(other);
  trial.x.detach().copy_(x);
  for (const auto& p : trial.params)
    if (auto* attrs = ops::find_wgrad_attrs(p); attrs && attrs->main_grad.defined()) attrs->main_grad.zero_();
  recording.replay();

  Trial fresh(c, dtype);
  fresh.x.detach().copy_(x);
  const auto expected = fresh.step(other);
  std::vector<size_t> different;
  for (size_t i = 0; i < expected.size(); ++i)
    if (!results.at(i).equal(expected[i])) different.push_back(i);
  return different;
}

TEST_P(GraphSafety, ReplayServesOtherSplits) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    EXPECT_EQ(replay_differences(GetParam(), dtype), std::vector<size_t>{}) << dtype;
}

INSTANTIATE_TEST_SUITE_P(
    Grouped, GraphSafety,
    ::testing::Values(
        Case{.name = "linear"}, Case{.name = "linear_single", .single = true},
        Case{.name = "linear_main_grad", .accumulate = true},
        Case{.name = "linear_delayed", .single = true, .delay = true}, Case{.name = "mlp", .mlp = true},
        Case{.name = "mlp_single", .mlp = true, .single = true},
        Case{.name = "mlp_main_grad", .mlp = true, .accumulate = true},
        Case{.name = "mlp_main_grad_delayed", .mlp = true, .single = true, .accumulate = true, .delay = true}),
    [](const auto& info) { return info.param.name; });

constexpr Case kPeeking{.name = "peeking", .peek = true};

TEST(GraphSafetyProofs, MetaDeviceFailsIfSplitsAreRead) {
  Trial trial(kPeeking, at::kFloat, at::kMeta);
  EXPECT_ANY_THROW(trial.step(at::empty({kGroups}, at::TensorOptions().dtype(at::kLong).device(at::kMeta))));
}

TEST(GraphSafetyProofsDeathTest, ProtectedPageFaultsIfSplitsAreRead) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Trial trial(kPeeking, at::kFloat);
  EXPECT_DEATH(
      {
        ProtectedPage page({11, 0, 25});
        trial.step(page.tensor);
      },
      "");
}

TEST(GraphSafetyProofs, ReplayDiffersIfSplitsAreRead) {
  EXPECT_NE(replay_differences(kPeeking, at::kFloat), std::vector<size_t>{});
}

}  // namespace
}  // namespace weft
