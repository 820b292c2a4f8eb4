// Fusions around a linear that is sharded over ranks: each is rejected or gives correct results.
#include <ATen/ops/randn_like.h>

#include "tests/cpp/fuser/testing.h"
#include "tests/cpp/thread_ranks.h"
#include "weft/fused/rules.h"
#include "weft/fuser/autograd.h"
#include "weft/fuser/call_validation.h"

namespace weft::fused {
namespace {

using fuser::Pipeline;
using weft::testing::expect_close;
using weft::testing::leaf;
using weft::testing::ThreadRanks;

/// Pipelines that some rule matches. LINEAR maps 12 features to 8; on each of two ranks, column maps 12 to 4 and row
/// maps 6 to 8. BY_ROWS gives a bias whose gradient is reduced over ranks.
const std::vector<std::string> kPipelines{
    "LINEAR; Bias(size=OUT)",
    "LINEAR; Bias(size=OUT); GELU()",
    "LINEAR; GEGLU()",
    "LINEAR; AddExtraInput(in_place=true)",
    "LINEAR; Bias(size=OUT); AddExtraInput()",
    "LINEAR; ConstantScale(scale=-2.5)",
    "LINEAR; ConstantScale(scale=-2.5); AddExtraInput()",
    "MakeExtraOutput(in_place=true); LINEAR",
    "Bias(size=IN); GELU(); LINEAR",
    "SReLU(); LINEAR",
    "RMSNorm(normalized_shape=[IN]); LINEAR; Bias(size=OUT)",
    "MakeExtraOutput(); LayerNorm(normalized_shape=[IN]); LINEAR; GELU()",
    "RMSNorm(normalized_shape=[IN]); LINEAR; Bias(size=OUT); GELU(); BasicLinear(in_features=OUT, out_features=6)",
    "RMSNorm(normalized_shape=[IN]); BasicLinear(in_features=IN, out_features=IN); GELU(); LINEAR",
    "Bias(size=IN, BY_ROWS); GELU(); BasicLinear(in_features=IN, out_features=6)",
    "LayerNorm(normalized_shape=[IN]); BasicLinear(in_features=IN, out_features=6); Bias(size=6, BY_ROWS); GELU()",
};

std::string substitute(std::string text, const std::vector<std::pair<std::string, std::string>>& words) {
  for (const auto& [word, value] : words)
    for (auto pos = text.find(word); pos != std::string::npos; pos = text.find(word, pos + value.size()))
      text.replace(pos, word.size(), value);
  return text;
}

struct Results {
  std::vector<at::Tensor> tensors;  // outputs, then gradients
  std::vector<at::Tensor> output_grads;
};

Results run(const Pipeline& pipeline, const RuleList& rules, const at::Tensor& x, const std::vector<at::Tensor>& params,
            const fuser::Tensors& extras, std::vector<at::Tensor> grads) {
  const auto plan = fuser::make_plan(pipeline, fuser::make_plan_key(pipeline, x, params, extras, 0), rules);
  const auto outputs = fuser::run_plan(std::make_shared<const Pipeline>(pipeline), plan, x, params, extras);
  std::vector<at::Tensor> inputs{x}, all(outputs.begin(), outputs.end());
  inputs.insert(inputs.end(), params.begin(), params.end());
  inputs.insert(inputs.end(), extras.begin(), extras.end());
  if (grads.empty())
    for (const auto& y : outputs) grads.push_back(at::randn_like(y));
  for (auto& g : torch::autograd::grad(all, inputs, grads, true, false, true)) all.push_back(g);
  return {all, grads};
}

TEST(ParallelRules, PreserveValuesAndGradients) {
  const auto rules = all_rules();
  for (const std::string mode : {"column", "row"}) {
    for (const std::string sequence : {"false", "true"}) {
      const bool column = mode == "column";
      const int64_t in = column ? 12 : 6, out = column ? 4 : 8;
      for (const auto& text : kPipelines) {
        const ThreadRanks ranks(2);
        ranks.run([&](int, const std::string& group) {
          const auto described = substitute(
              text, {{"LINEAR", "BasicLinear(in_features=12, out_features=8, tensor_parallel_mode=\"" + mode +
                                    "\", tensor_parallel_group=\"GROUP\", sequence_parallel=" + sequence +
                                    ", overlap=false)"},
                     {"BY_ROWS", "sequence_parallel=true, tensor_parallel_group=\"GROUP\""},
                     {"GROUP", group},
                     {"IN", std::to_string(in)},
                     {"OUT", std::to_string(out)}});
          const auto pipeline = Pipeline::parse(described);
          const auto params = weft::testing::parameters(pipeline);
          const auto x = leaf({32, in});  // dy of a row linear then has 16 rows: min_rows of every rule
          fuser::Tensors extras;
          const int64_t rows = sequence == "false" ? 32 : column ? 64 : 16;
          if (!pipeline.caller_inputs().empty()) extras.push_back(leaf({rows, out}));
          const auto plain = run(pipeline, {}, x, params, extras, {});
          const auto fused = run(pipeline, *rules, x, params, extras, plain.output_grads);
          for (size_t i = 0; i < plain.tensors.size(); ++i)
            expect_close(fused.tensors[i], plain.tensors[i], described + " result " + std::to_string(i));
        });
      }
    }
  }
}

TEST(ParallelRules, ReportRejectionReasons) {
  const ThreadRanks ranks(2);
  const auto reason = [&](const std::string& mode, const std::string& text) {
    const auto pipeline = Pipeline::parse(
        substitute(text, {{"LINEAR", "BasicLinear(in_features=12, out_features=12, tensor_parallel_mode=\"" + mode +
                                         "\", tensor_parallel_group=\"" + ranks.name(0) + "\", overlap=false)"}}));
    const auto params = weft::testing::parameters(pipeline);
    const auto x = leaf({4, mode == "row" ? 6 : 12});
    const auto plan =
        fuser::make_plan(pipeline, fuser::make_plan_key(pipeline, x, params, {}, 0), *current_rules().list);
    std::string all;
    for (const auto& rejection : plan->rejections) all += rejection.reason + "\n";
    return all;
  };
  EXPECT_NE(reason("row", "LINEAR; Bias(size=12)").find("reduced over ranks before the next operation"),
            std::string::npos);
  EXPECT_NE(reason("column", "LINEAR; ConstantScale(scale=2.0)").find("dx of BasicLinear is reduced over ranks"),
            std::string::npos);
  EXPECT_NE(reason("column",
                   "RMSNorm(normalized_shape=[12]); LINEAR; GELU(); BasicLinear(in_features=6, "
                   "out_features=12)")
                .find("sharded over ranks"),
            std::string::npos);
}

}  // namespace
}  // namespace weft::fused
