#include "weft/fuser/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weft::fuser {
namespace {

using ::testing::HasSubstr;

std::string error_of(const std::string& text) {
  try {
    Pipeline::parse(text);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

constexpr const char* kResidual =
    "MakeExtraOutput(in_place=false) >>\"branch\"; BasicLinear(in_features=4, out_features=4); "
    "AddExtraInput(in_place=true) <\"branch\"";

TEST(Pipeline, TextRoundTrips) {
  const auto pipeline = Pipeline::parse(kResidual);
  EXPECT_EQ(Pipeline::parse(pipeline.text()).text(), pipeline.text());
  EXPECT_THAT(pipeline.text(), HasSubstr("MakeExtraOutput(in_place=false) >>\"branch\""));
}

TEST(Pipeline, TextKeepsFields) {
  const std::string text =
      "LayerNorm(normalized_shape=[4], eps=1e-05, dtype=\"float32\", zero_centered_gamma=false, sm_margin=0, "
      "bias=false); GELU(approximate=\"none\", cache_quantized_input=false)";
  EXPECT_EQ(Pipeline::parse(text).text(), text);
}

TEST(Pipeline, TextKeepsCallerSlotsAndQuotedChannelNames) {
  const std::string text = "AddExtraInput(in_place=false) <-; MakeExtraOutput(in_place=true) >\"a \\\"b\\\\\"";
  EXPECT_EQ(Pipeline::parse(text).text(), text);
}

TEST(Pipeline, RoutesChannelFromProducerToConsumer) {
  const auto pipeline = Pipeline::parse(kResidual);
  EXPECT_EQ(pipeline.source(0), 0);
  EXPECT_EQ(pipeline.producer(0), 0);
  EXPECT_EQ(pipeline.consumer(0), 2);
  EXPECT_TRUE(pipeline.caller_inputs().empty());
  EXPECT_TRUE(pipeline.caller_outputs().empty());
}

TEST(Pipeline, RejectsInvalidWiring) {
  EXPECT_THAT(error_of("AddExtraInput() <\"r\""), HasSubstr("has no producer"));
  EXPECT_THAT(error_of("MakeExtraOutput() >\"left\"; AddExtraInput() <\"let\""), HasSubstr("Did you mean 'left'?"));
  EXPECT_THAT(error_of("AddExtraInput() <\"r\"; MakeExtraOutput() >\"r\""), HasSubstr("has no earlier producer"));
  EXPECT_THAT(error_of("MakeExtraOutput() >\"r\"; MakeExtraOutput() >\"r\""), HasSubstr("multiple producers"));
}

TEST(Pipeline, ParseErrorsNameThePosition) {
  EXPECT_THAT(error_of("NoSuchOp()"), HasSubstr("Unknown operation 'NoSuchOp'"));
  EXPECT_THAT(error_of("GELU("), HasSubstr("position"));
  EXPECT_THAT(error_of("GELU() GELU()"), HasSubstr("expected ;"));
  EXPECT_THAT(error_of("ConstantScale(scale=\"much\")"),
              HasSubstr("ConstantScale: scale is \"much\", expected a number."));
  EXPECT_THAT(error_of("GELUU()"), HasSubstr("Did you mean 'GELU'?"));
  EXPECT_THAT(error_of("Dropout(prob=0.5)"), HasSubstr("Arguments: p."));
}

}  // namespace
}  // namespace weft::fuser
