#include "weft/fuser/functional.h"

#include <algorithm>
#include <iterator>
#include <list>
#include <mutex>
#include <sstream>

#include "weft/core/dispatch_keys.h"
#include "weft/fuser/call_validation.h"
#include "weft/fuser/executor.h"
#include "weft/quant/recipe.h"

namespace weft::fuser {
namespace {

using fused::PlanKey;
using fused::TensorMeta;
using ops::Spec;

std::string meta_text(const TensorMeta& t) {
  return c10::DeviceTypeName(t.device, /*lower_case=*/true) + ":" + std::string(dtype_name(t.dtype)) + ":" +
         (t.requires_grad ? "g" : "") + (t.contiguous ? "c" : "");
}

TensorMeta meta_from_text(const std::string& word) {
  const auto first = word.find(':'), second = word.find(':', first + 1);
  TORCH_CHECK_VALUE(first != std::string::npos && second != std::string::npos, "Pipeline text: '", word,
                    "' does not describe a tensor; expected device:dtype:flags, e.g. cpu:float32:gc.");
  const auto flags = word.substr(second + 1);
  return {dtype_from_name(word.substr(first + 1, second - first - 1)), c10::Device(word.substr(0, first)).type(), true,
          flags.find('g') != std::string::npos, flags.find('c') != std::string::npos};
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

/// What follows the pipeline in a text.
struct CallText {
  PlanKey key;
  std::vector<std::string> joint_rules;
};

CallText call_from(Parser& text, const Pipeline& pipeline) {
  text.expect("@call(autocast=");
  const auto autocast = text.value();
  const auto recipe = text.accept(", recipe=") ? quant::recipe_id(quant::Recipe::parse(text.string())) : 0;
  text.expect(", eval=");
  const auto eval = text.unsigned_integer();
  auto joint_rules = text.accept(", joint=") ? words_of(text.string()) : std::vector<std::string>{};
  text.expect(", tensors=");
  const auto tensors = words_of(text.string());
  text.expect(")");
  const auto* dtype = std::get_if<std::string>(&autocast);
  PlanKey key(true, dtype ? dtype_from_name(*dtype) : at::ScalarType::Undefined, recipe, fused::rules_version(), eval);
  for (const auto& word : tensors) key.add(meta_from_text(word).pack());
  const auto expected = 1 + pipeline.caller_inputs().size() + pipeline.params().size();
  TORCH_CHECK_VALUE(static_cast<size_t>(key.num_tensors()) == expected, "Pipeline text: the call describes ",
                    key.num_tensors(), " tensors, expected ", expected, ".");
  return {std::move(key), std::move(joint_rules)};
}

bool is_joint(const fused::FusionRule& rule) { return fused::pass_of(rule) == fused::Pass::joint; }

/// The enabled forward and backward rules, and the joint rules that the text names, enabled or not. Joint rules change
/// what is saved: the two passes may run in different processes with different rules, and an exported program has fixed
/// the sizes of the saved tensors. Only the library's own joint rules, which have no slots of their own, can be named.
fused::RuleList rules_for(const fused::RuleList& enabled, const std::vector<std::string>& joint) {
  fused::RuleList rules;
  for (const auto& entry : enabled)
    if (!is_joint(entry.second)) rules.push_back(entry);
  const auto all = fused::all_rules();
  for (const auto& name : joint) {
    const auto found = std::find_if(all->begin(), all->end(), [&](const auto& entry) {
      return is_joint(entry.second) && fused::is_builtin(entry.first) && fused::name_of(entry.second) == name;
    });
    TORCH_CHECK_VALUE(found != all->end(), "Pipeline text: weft has no joint fusion '", name,
                      "'. Trace the program again with this version of weft.");
    rules.push_back(*found);
  }
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
                    "Pipeline text: expected '@call(…)' at the end. Create the text with describe().");
  auto pipeline = std::make_shared<const Pipeline>(Pipeline::parse(text.substr(0, call)));
  Parser parser(text.substr(call));
  const auto [key, joint_rules] = call_from(parser, *pipeline);
  auto plan = make_plan(*pipeline, key, rules_for(*rules.list, joint_rules));
  const std::lock_guard lock(mutex);
  kept.push_front({std::string(text), rules.version, std::move(pipeline), std::move(plan)});
  if (kept.size() > kKept) kept.pop_back();
  return kept.front();
}

std::vector<bool> accumulates_into_main_grad(const Pipeline& pipeline) {
  const auto accumulates = [&](int op) {
    const auto fields = pipeline.op(op).fields();
    return std::any_of(fields.begin(), fields.end(), [](const FieldValue& field) {
      return field.name == "accumulate_into_main_grad" && field.value == Value(true);
    });
  };
  std::vector<bool> list;
  for (int i = 0; i < pipeline.size(); ++i)
    for (int p = pipeline.param_base(i); p < pipeline.param_base(i + 1); ++p)
      list.push_back(pipeline.params()[p].supports_main_grad && accumulates(i));
  return list;
}

std::string enabled_joint_rules() {
  std::string names;
  for (const auto& [id, rule] : *fused::current_rules().list)
    if (is_joint(rule) && fused::is_builtin(id)) names.append(names.empty() ? "" : " ").append(fused::name_of(rule));
  return names;
}

std::string describe(const Pipeline& pipeline, const PlanKey& key) {
  TORCH_CHECK_NOT_IMPLEMENTED(!pipeline.process_local(),
                              "Pipeline: an operation written in Python has no text, so the call cannot be described.");
  std::string tensors;
  for (int i = 0; i < key.num_tensors(); ++i) tensors.append(i ? " " : "").append(meta_text(key.tensor_meta(i)));
  const auto autocast =
      key.autocast() == at::ScalarType::Undefined ? Value{} : Value(std::string(dtype_name(key.autocast())));
  const auto* recipe = quant::find_recipe(key.recipe());
  return pipeline.text() + " @call(autocast=" + to_text(autocast) +
         (recipe ? ", recipe=" + to_text(recipe->text()) : std::string()) +
         ", eval=" + std::to_string(key.eval_mask()) + ", joint=" + to_text(enabled_joint_rules()) +
         ", tensors=" + to_text(tensors) + ")";
}

namespace {

/// Makes tensors contiguous where the text says so, since the plan relies on it.
Tensors as_described(const PlanKey& key, int first, c10::ArrayRef<at::Tensor> tensors) {
  Tensors list;
  for (size_t i = 0; i < tensors.size(); ++i)
    list.push_back(key.tensor_meta(first + static_cast<int>(i)).contiguous ? tensors[i].contiguous() : tensors[i]);
  return list;
}

void check_spec(const char* what, size_t index, const at::Tensor& t, const Spec& spec, const at::Tensor& x) {
  const bool fits = ops::same_sizes(t.sym_sizes(), spec.sizes) && t.scalar_type() == spec.dtype;
  TORCH_CHECK_VALUE(fits && t.device() == x.device(), "weft: ", what, " ", index, " is ", dtype_name(t.scalar_type()),
                    " of shape ", t.sizes(), " on ", t.device(), ", expected ", dtype_name(spec.dtype), " of shape ",
                    spec.sizes, " on ", x.device(), ".");
}

/// The saved tensors, checked against `infer`; undefined for empty slots.
std::vector<at::Tensor> checked_saved(const CallShapes& shapes, c10::ArrayRef<at::Tensor> saved, const at::Tensor& x,
                                      ops::Params params) {
  TORCH_CHECK_VALUE(saved.size() == shapes.saved.size(), "Pipeline: expected ", shapes.saved.size(),
                    " saved tensors, got ", saved.size(), ".");
  std::vector<at::Tensor> kept(saved.size());
  for (size_t k = 0; k < saved.size(); ++k) {
    const auto& slot = shapes.saved[k];
    if (!slot.spec) continue;
    kept[k] = slot.is_stored()         ? saved[k]
              : slot.is_caller_input() ? x.reshape_symint(slot.spec->sizes)
                                       : params[slot.index];
    TORCH_CHECK_VALUE(kept[k].defined(), "weft: saved tensor ", k, " ('", slot.name, "' of operation ", slot.op,
                      ") is undefined.");
    check_spec("saved tensor", k, kept[k], *slot.spec, x);
  }
  check_gradients(kept, "a saved tensor");
  return kept;
}

void check_grads(const CallShapes& shapes, c10::ArrayRef<at::Tensor> grads, const at::Tensor& x) {
  TORCH_CHECK_VALUE(grads.size() == shapes.outputs.size(), "Pipeline: expected ", shapes.outputs.size(),
                    " gradients, one per output, got ", grads.size(), ".");
  for (size_t k = 0; k < grads.size(); ++k)
    if (grads[k].defined()) check_spec("the gradient of output", k, grads[k], shapes.outputs[k], x);
  check_gradients(grads);
}

}  // namespace

Forward forward(const at::Tensor& x, ops::Params params, c10::ArrayRef<at::Tensor> extras, std::string_view text) {
  const auto [name, version, pipeline, plan] = program(text);
  check_against_key(*pipeline, plan->key, x, params, extras);
  Forward out;
  out.shapes = infer(*pipeline, *plan, x, params, extras);
  const BelowAutograd below;
  const auto inputs = as_described(plan->key, 0, x), given = as_described(plan->key, 1, extras);
  const auto held = as_described(plan->key, 1 + static_cast<int>(extras.size()), params);
  out.saved.resize(plan->num_saved);
  Tensors extra_in(pipeline->num_extra_in()), extra_out(pipeline->num_extra_out());
  for (size_t k = 0; k < extras.size(); ++k) extra_in[pipeline->caller_inputs()[k]] = given[k];
  ops::Frame frame{
      .saved = out.saved.data(), .extra_in = extra_in.data(), .extra_out = extra_out.data(), .params = held.data()};
  out.outputs.push_back(run_forward(*pipeline, *plan, frame, inputs[0]));
  for (const int slot : pipeline->caller_outputs()) out.outputs.push_back(std::move(extra_out[slot]));
  return out;
}

std::vector<at::Tensor> backward(c10::ArrayRef<at::Tensor> grads, c10::ArrayRef<at::Tensor> saved, const at::Tensor& x,
                                 ops::Params params, c10::ArrayRef<at::Tensor> extras, std::string_view text,
                                 const ops::LeafParams* leaf_params) {
  const auto [name, version, pipeline, plan] = program(text);
  check_against_key(*pipeline, plan->key, x, params, extras);
  const auto shapes = infer(*pipeline, *plan, x, params, extras);
  check_grads(shapes, grads, x);
  const BelowAutograd below;
  const auto held = as_described(plan->key, 1 + static_cast<int>(extras.size()), params);
  auto kept = checked_saved(shapes, saved, as_described(plan->key, 0, x)[0], held);
  const auto& outputs = pipeline->caller_outputs();
  const auto& inputs = pipeline->caller_inputs();
  std::vector<at::Tensor> out(1 + params.size() + inputs.size());
  Tensors extra_in(pipeline->num_extra_in()), extra_out(pipeline->num_extra_out());
  for (size_t k = 0; k < outputs.size(); ++k) extra_out[outputs[k]] = grads[1 + k];
  ops::Frame frame{.saved = kept.data(),
                   .extra_in = extra_in.data(),
                   .extra_out = extra_out.data(),
                   .param_grads = out.data() + 1,
                   .params = held.data(),
                   .leaf_params = leaf_params};
  out[0] = run_backward(*pipeline, *plan, frame, grads[0]);
  for (size_t k = 0; k < inputs.size(); ++k) out[1 + params.size() + k] = std::move(extra_in[inputs[k]]);
  return out;
}

}  // namespace weft::fuser
