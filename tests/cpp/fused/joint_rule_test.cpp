// A joint fusion may save into additional slots; below min_rows the basic operations run in both passes.
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>

#include "tests/cpp/fuser/testing.h"
#include "weft/fused/rules.h"
#include "weft/ops/activation.h"
#include "weft/ops/constant_scale.h"

namespace weft::fused {
namespace {

using weft::testing::expect_close;
using weft::testing::grad;
using weft::testing::leaf;

int forward_runs = 0, backward_runs = 0;

/// y = gelu(s·x); saves s·x in an additional slot.
class ScaledGelu final : public JointFusion {
 public:
  explicit ScaledGelu(const Match& match) : scale_(match.get<ops::ConstantScale>().options().scale) {}

  std::vector<std::string> saved_names() const override { return {"scaled input"}; }
  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    ++forward_runs;
    const auto scaled = x * scale_;
    if (ctx.op(0).needs_grad()) ctx.save(0, scaled);
    return at::gelu(scaled, "tanh");
  }
  ops::Gradient backward(StepContext& ctx, const ops::Gradient& dy) const override {
    ++backward_runs;
    return at::gelu_backward(dy.value, ctx.saved(0), "tanh") * scale_;
  }

 private:
  double scale_;
};

class JointRule : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    forward_runs = backward_runs = 0;
    id_ = add_rule(PatternRule{.name = "scaled_gelu",
                               .pattern = {one<ops::ConstantScale>(), one<ops::GELU>()},
                               .make = make_fused<ScaledGelu>(),
                               .min_rows = GetParam()});
  }
  void TearDown() override { remove_rule(id_); }

  int64_t id_ = 0;
};

TEST_P(JointRule, RunsBothPassesOrNeither) {
  fuser::Fuser fuser(fuser::Pipeline::parse("ConstantScale(scale=1.5); GELU(); ConstantScale(scale=2.0)"));
  const auto x = leaf({4, 3}), dy = at::randn({4, 3}, at::kDouble);
  const auto y = fuser(x, {}, {})[0], plain = at::gelu(x * 1.5, "tanh") * 2;
  expect_close(y, plain, "y");
  expect_close(grad(y, {x}, dy)[0], grad(plain, {x}, dy)[0], "dx");
  const int expected = GetParam() <= 4 ? 1 : 0;
  EXPECT_EQ(forward_runs, expected);
  EXPECT_EQ(backward_runs, expected);
}

INSTANTIATE_TEST_SUITE_P(MinRows, JointRule, ::testing::Values(0, 4, 5));

}  // namespace
}  // namespace weft::fused
