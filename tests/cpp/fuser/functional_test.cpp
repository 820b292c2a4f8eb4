#include "weft/fuser/functional.h"

#include "tests/cpp/fuser/testing.h"
#include "weft/fuser/call_validation.h"

namespace weft::fuser {
namespace {

using weft::testing::expect_close;
using weft::testing::grad;
using weft::testing::leaf;

constexpr const char* kBlock =
    "MakeExtraOutput(in_place=true) >\"r\"; RMSNorm(normalized_shape=[4]); BasicLinear(in_features=4, out_features=8); "
    "Bias(size=8); "
    "SwiGLU(); BasicLinear(in_features=4, out_features=4); AddExtraInput(in_place=true) <\"r\"; AddExtraInput() <-";

TEST(Functional, MatchesAutogradNode) {
  Fuser fuser(Pipeline::parse(kBlock));
  const auto p = weft::testing::parameters(fuser.pipeline());
  const auto x = leaf({3, 4}), extra = leaf({3, 4}), dy = at::randn({3, 4}, at::kDouble);
  const auto text = describe(fuser.pipeline(), make_plan_key(fuser.pipeline(), x, p, {extra}, 0));

  const auto y = fuser(x, p, {extra});
  const auto out = forward(x, p, {extra}, text);
  ASSERT_EQ(out.outputs.size(), 2);
  expect_close(out.outputs[0], y[0], "y");
  expect_close(out.outputs[1], y[1], "extra output");

  std::vector<at::Tensor> inputs{x};
  inputs.insert(inputs.end(), p.begin(), p.end());
  inputs.push_back(extra);
  const auto expected = grad(y[0], inputs, dy);
  const auto got = backward({dy, at::Tensor()}, out.saved, x, p, {extra}, text);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) expect_close(got[i], expected[i], "gradient " + std::to_string(i));
}

TEST(Functional, ReturnsOnlyRequestedGradients) {
  Fuser fuser(Pipeline::parse("BasicLinear(in_features=4, out_features=2)"));
  auto p = weft::testing::parameters(fuser.pipeline());
  const auto x = at::randn({3, 4}, at::kDouble);
  const auto text = describe(fuser.pipeline(), make_plan_key(fuser.pipeline(), x, p, {}, 0));
  const auto got = backward({at::randn({3, 2}, at::kDouble)}, forward(x, p, {}, text).saved, x, p, {}, text);
  EXPECT_FALSE(got[0].defined());
  EXPECT_TRUE(got[1].defined());
}

TEST(Functional, RejectsMissingCallAndWrongCounts) {
  const auto x = at::randn({3, 4});
  EXPECT_THROW(forward(x, {}, {}, "GELU()"), c10::ValueError);
  EXPECT_THROW(forward(x, {}, {}, "GELU() @call(autocast=none, eval=0, tensors=\"cpu:float32:c cpu:float32:c\")"),
               c10::ValueError);
  EXPECT_THROW(forward(x, {x}, {}, "GELU() @call(autocast=none, eval=0, tensors=\"cpu:float32:c\")"), c10::ValueError);
}

}  // namespace
}  // namespace weft::fuser
