#include "weft/fuser/functional.h"

#include <list>
#include <mutex>
#include <sstream>

#include "weft/fuser/below_autograd.h"
#include "weft/fuser/executor.h"

namespace weft::fuser {
namespace {

using fused::PlanKey;
using fused::Trait;

/// Also of integers, which extra inputs may be.
std::string_view trait_dtype(at::ScalarType dtype) {
  return dtype == at::kLong ? "int64" : dtype == at::kInt ? "int32" : dtype_name(dtype);
}
at::ScalarType trait_dtype(const std::string& name) {
  return name == "int64" ? at::kLong : name == "int32" ? at::kInt : dtype_from_name(name);
}

std::string trait_text(const Trait& t) {
  return c10::DeviceTypeName(t.device, /*lower_case=*/true) + ":" + std::string(trait_dtype(t.dtype)) + ":" +
         (t.requires_grad ? "g" : "") + (t.contiguous ? "c" : "");
}

Trait trait_from(const std::string& word) {
  const auto first = word.find(':'), second = word.find(':', first + 1);
  TORCH_CHECK_VALUE(first != std::string::npos && second != std::string::npos, "Pipeline text: '", word,
                    "' does not describe a tensor; expected device:dtype:flags, e.g. cpu:float32:gc.");
  const auto flags = word.substr(second + 1);
  return {trait_dtype(word.substr(first + 1, second - first - 1)), c10::Device(word.substr(0, first)).type(), true,
          flags.find('g') != std::string::npos, flags.find('c') != std::string::npos};
}

PlanKey key_from(Cursor& text, const Pipeline& pipeline) {
  text.expect("@call(autocast=");
  const auto autocast = text.value();
  text.expect(", eval=");
  const auto eval = static_cast<uint64_t>(text.integer());
  text.expect(", tensors=");
  std::istringstream words(std::get<std::string>(text.value()));
  text.expect(")");
  const auto* dtype = std::get_if<std::string>(&autocast);
  PlanKey key(true, dtype ? dtype_from_name(*dtype) : at::ScalarType::Undefined, fused::rules_version(), eval);
  for (std::string word; words >> word;) key.add(trait_from(word).pack());
  const auto expected = 1 + pipeline.caller_inputs().size() + pipeline.params().size();
  TORCH_CHECK_VALUE(static_cast<size_t>(key.traits()) == expected, "Pipeline text: the call describes ", key.traits(),
                    " tensors, the pipeline takes ", expected, ".");
  return key;
}

/// The rules that leave no trace in what is saved. The two passes may run in different processes, under different
/// rules, and a recorded program knows the sizes of the saved tensors: so no joint ones.
fused::RuleList interchangeable(fused::RuleList rules) {
  std::erase_if(rules, [](const auto& entry) { return entry.second.pass == fused::Pass::joint; });
  return rules;
}

}  // namespace

Program program(std::string_view text) {
  constexpr size_t kKept = 64;
  static std::mutex mutex;
  static std::list<Program> kept;
  const auto rules = fused::current_rules();
  {
    const std::lock_guard lock(mutex);
    for (auto found = kept.begin(); found != kept.end(); ++found) {
      if (found->text != text || found->rules_version != rules.version) continue;
      kept.splice(kept.begin(), kept, found);
      return kept.front();
    }
  }
  const auto call = text.rfind("@call(");
  TORCH_CHECK_VALUE(call != std::string_view::npos,
                    "Pipeline text: no '@call(…)' at the end; make the text with describe().");
  auto pipeline = std::make_shared<const Pipeline>(Pipeline::parse(text.substr(0, call)));
  Cursor cursor(text.substr(call));
  auto plan = make_plan(*pipeline, key_from(cursor, *pipeline), interchangeable(*rules.list));
  const std::lock_guard lock(mutex);
  kept.push_front({std::string(text), rules.version, std::move(pipeline), std::move(plan)});
  if (kept.size() > kKept) kept.pop_back();
  return kept.front();
}

std::string describe(const Pipeline& pipeline, const PlanKey& key) {
  TORCH_CHECK_NOT_IMPLEMENTED(!pipeline.process_local(),
                              "The pipeline holds an operation written in Python, which has no text.");
  std::string tensors;
  for (int i = 0; i < key.traits(); ++i) tensors.append(i ? " " : "").append(trait_text(key.trait(i)));
  const auto autocast =
      key.autocast() == at::ScalarType::Undefined ? Value{} : Value(std::string(dtype_name(key.autocast())));
  return pipeline.text() + " @call(autocast=" + to_text(autocast) + ", eval=" + std::to_string(key.eval_mask()) +
         ", tensors=" + to_text(tensors) + ")";
}

Forward forward(const at::Tensor& x, ops::Params params, c10::ArrayRef<at::Tensor> extras, std::string_view text) {
  const auto [name, version, pipeline, plan] = program(text);
  TORCH_CHECK_VALUE(params.size() == pipeline->params().size(), "The pipeline has ", pipeline->params().size(),
                    " parameters, got ", params.size(), ".");
  TORCH_CHECK_VALUE(extras.size() == pipeline->caller_inputs().size(), "The pipeline takes ",
                    pipeline->caller_inputs().size(), " extra inputs, got ", extras.size(), ".");
  const BelowAutograd below;
  Forward out;
  out.saved.resize(plan->num_saved);
  Tensors extra_in(pipeline->num_extra_in()), extra_out(pipeline->num_extra_out());
  for (size_t k = 0; k < extras.size(); ++k) extra_in[pipeline->caller_inputs()[k]] = extras[k];
  ops::Frame frame{.saved = out.saved.data(),
                   .extra_in = extra_in.data(),
                   .extra_out = extra_out.data(),
                   .param_grads = nullptr,
                   .params = params.data(),
                   .more_saved = nullptr,
                   .states = nullptr,
                   .leaves = nullptr};
  out.outputs.push_back(run_forward(*pipeline, *plan, frame, x));
  for (const int slot : pipeline->caller_outputs()) out.outputs.push_back(std::move(extra_out[slot]));
  return out;
}

std::vector<at::Tensor> backward(c10::ArrayRef<at::Tensor> grads, c10::ArrayRef<at::Tensor> saved, ops::Params params,
                                 std::string_view text) {
  const auto [name, version, pipeline, plan] = program(text);
  const auto& outputs = pipeline->caller_outputs();
  const auto& inputs = pipeline->caller_inputs();
  TORCH_CHECK_VALUE(grads.size() == 1 + outputs.size(), "The pipeline has ", 1 + outputs.size(), " outputs, got ",
                    grads.size(), " gradients.");
  TORCH_CHECK_VALUE(static_cast<int>(saved.size()) == plan->num_saved, "The pipeline saves ", plan->num_saved,
                    " tensors, got ", saved.size(), ".");
  const BelowAutograd below;
  std::vector<at::Tensor> kept(saved.begin(), saved.end()), out(1 + params.size() + inputs.size());
  Tensors extra_in(pipeline->num_extra_in()), extra_out(pipeline->num_extra_out());
  for (size_t k = 0; k < outputs.size(); ++k) extra_out[outputs[k]] = grads[1 + k];
  ops::Frame frame{.saved = kept.data(),
                   .extra_in = extra_in.data(),
                   .extra_out = extra_out.data(),
                   .param_grads = out.data() + 1,
                   .params = params.data(),
                   .more_saved = nullptr,
                   .states = nullptr,
                   .leaves = nullptr};
  out[0] = run_backward(*pipeline, *plan, frame, grads[0]);
  for (size_t k = 0; k < inputs.size(); ++k) out[1 + params.size() + k] = std::move(extra_in[inputs[k]]);
  return out;
}

}  // namespace weft::fuser
