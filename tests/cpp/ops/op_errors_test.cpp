// Argument checks of single operations: the exception type that Python sees, and the values in the message.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cmath>

#include <cmath>

#include "weft/ops/registry.h"

namespace weft::ops {
namespace {

template <class Error>
void expect_error(const std::function<void()>& act, const std::string& text) {
  try {
    act();
    FAIL() << "nothing raised, expected: " << text;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

void make(const std::string& name, const Keywords& keywords) { op_type(name).make(keywords); }

at::Tensor run(const std::string& name, const Keywords& keywords, const at::Tensor& x,
               std::vector<at::Tensor> extra = {}) {
  const auto op = op_type(name).make(keywords);
  OpPlan plan;
  plan.needs_param_grad.resize(op->params().size());
  plan.needs_extra_grad.resize(extra.size());
  std::vector<at::Tensor> params;
  for (const auto& spec : op->params()) params.push_back(at::rand(spec.shape));
  Frame frame{.extra_in = extra.data()};
  OpContext ctx(plan, frame, 0);
  return op->forward(ctx, x, params);
}

TEST(OpErrors, GatedInputsNeedEvenColumns) {
  for (const std::string name : {"SwiGLU", "SiTUGLU", "ClampedSwiGLU", "GLU", "ReGLU"})
    expect_error<c10::ValueError>([&] { run(name, {}, at::empty({2, 7})); },
                                  "input has 7 columns, expected an even number.");
  expect_error<c10::ValueError>([] { run("SwiGLU", {{"glu_interleave_size", int64_t{4}}}, at::empty({2, 12})); },
                                "half of the input has 6 columns, expected a multiple of glu_interleave_size 4");
  expect_error<c10::ValueError>([] { make("SwiGLU", {{"glu_interleave_size", int64_t{0}}}); },
                                "glu_interleave_size is 0");
}

TEST(OpErrors, BetaMustBeFiniteAndPositive) {
  expect_error<c10::ValueError>([] { make("SiTUGLU", {{"beta1", 0.0}}); }, "beta1 is 0");
  expect_error<c10::ValueError>([] { make("ScaledSiTUGLU", {{"beta2", HUGE_VAL}}); }, "beta2 is inf");
  expect_error<c10::ValueError>([] { make("ScaledTanhSReLU", {{"tanh_clamp_scale", -1.0}}); },
                                "tanh_clamp_scale is -1");
}

TEST(OpErrors, EnumFieldsListTheirNames) {
  expect_error<c10::ValueError>([] { make("GELU", {{"approximate", std::string("erf")}}); },
                                R"(GELU: approximate is "erf", expected one of tanh, none.)");
}

TEST(OpErrors, Float64InputsAreNotCachedInFp8) {
  for (const std::string name : {"GELU", "GEGLU", "SwiGLU"})
    expect_error<c10::TypeError>([&] { run(name, {{"cache_quantized_input", true}}, at::ones({2, 8}, at::kDouble)); },
                                 "input is float64, expected float32, float16 or bfloat16 with cache_quantized_input");
}

TEST(OpErrors, EpsIsNotNegative) {
  for (const double eps : {-1.0, -1e-30, std::nan(""), HUGE_VAL}) {
    for (const std::string name : {"RMSNorm", "LayerNorm"})
      expect_error<c10::ValueError>([&] { make(name, {{"normalized_shape", std::vector<int64_t>{8}}, {"eps", eps}}); },
                                    name + ": eps is ");
    expect_error<c10::ValueError>([&] { make("L2Normalization", {{"eps", eps}}); }, "L2Normalization: eps is ");
  }
}

TEST(OpErrors, RecomputeNeedsFusedMlp) {
  const Keywords recompute{{"activation_recompute_in_mlp", true}};
  for (const std::string name : {"ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU"})
    expect_error<c10::ValueError>([&] { make(name, recompute); }, "does not support activation recomputation");
  expect_error<c10::Error>([&] { run("ScaledSReLU", recompute, at::empty({2, 8}), {at::empty({2})}); }, "grouped MLP");
  const Keywords tanh{{"activation_recompute_in_mlp", true}, {"tanh_clamp_scale", 2.0}};
  expect_error<c10::Error>([&] { run("ScaledTanhSReLU", tanh, at::empty({2, 8}), {at::empty({2})}); }, "grouped MLP");
}

TEST(OpErrors, ScalesNeedOneValuePerRow) {
  expect_error<c10::ValueError>([] { run("ScaledSwiGLU", {}, at::empty({2, 3, 8}), {at::empty({5})}); },
                                "scales have shape [5], input has shape [2, 3, 8], that is 6 rows");
}

TEST(OpErrors, NormsCheckTrailingDimensions) {
  const Keywords shape{{"normalized_shape", std::vector<int64_t>{4, 2}}};
  for (const std::string name : {"LayerNorm", "RMSNorm"}) {
    expect_error<c10::ValueError>([&] { run(name, shape, at::empty({3, 8})); },
                                  "input has shape [3, 8], normalized_shape is [4, 2]");
    expect_error<c10::ValueError>([&] { run(name, shape, at::empty({2})); }, "input has shape [2]");
    expect_error<c10::TypeError>([&] { make(name, {}); }, "normalized_shape");
  }
}

TEST(OpErrors, ExtraInputsAreNotBroadcast) {
  expect_error<c10::ValueError>([] { run("AddExtraInput", {}, at::empty({3, 8}), {at::empty({8})}); },
                                "input has shape [3, 8], extra input has shape [8]");
}

TEST(OpErrors, DropoutNeedsProbability) {
  expect_error<c10::ValueError>([] { make("Dropout", {{"p", 1.5}}); }, "p is 1.5");
  expect_error<c10::ValueError>([] { make("Dropout", {{"p", -0.1}}); }, "p is -0.1");
}

TEST(OpErrors, ReshapeInfersAtMostOneSize) {
  for (const auto& shape : {std::vector<int64_t>{-1, -1}, {-1, 0}, {-2, 4}})
    expect_error<c10::ValueError>([&] { make("Reshape", {{"shape", shape}}); }, "Reshape: shape is ");
}

TEST(OpErrors, CollectivesNeedGroupName) {
  for (const std::string name : {"AllGather", "ReduceScatter", "AllReduce"}) {
    expect_error<c10::ValueError>([&] { make(name, {{"process_group_size", int64_t{2}}}); },
                                  name + ": expected a process group");
    expect_error<c10::ValueError>([&] { make(name, {{"process_group", std::string("nobody")}}); }, "'nobody'");
    expect_error<c10::ValueError>([&] { make(name, {{"process_group_size", int64_t{0}}}); }, "group size is 0");
  }
  expect_error<c10::ValueError>([&] { make("Bias", {{"size", int64_t{8}}, {"tensor_parallel", true}}); }, "got none");
}

TEST(OpErrors, BiasIsShardedOrReplicated) {
  expect_error<c10::ValueError>(
      [&] { make("Bias", {{"size", int64_t{8}}, {"tensor_parallel", true}, {"sequence_parallel", true}}); },
      "set only one");
}

TEST(Dropout, HandlesProbabilitiesZeroAndOne) {
  const auto x = at::randn({4, 4}) / 0;
  EXPECT_EQ(run("Dropout", {{"p", 1.0}}, x).ne(0).sum().item<int64_t>(), 0);
  EXPECT_TRUE(run("Dropout", {{"p", 0.0}}, x).is_same(x));
}

TEST(AddExtraInput, AddsInPlaceOnlyIntoUnsharedMemory) {
  const auto x = at::randn({4});
  auto kept = at::randn({4});
  EXPECT_FALSE(run("AddExtraInput", {{"in_place", true}}, x, {kept}).is_same(kept));
  auto given = at::randn({4});
  const auto* memory = given.unsafeGetTensorImpl();
  std::vector<at::Tensor> extra;
  extra.push_back(std::move(given));
  EXPECT_EQ(run("AddExtraInput", {{"in_place", true}}, x, std::move(extra)).unsafeGetTensorImpl(), memory);
}

}  // namespace
}  // namespace weft::ops
