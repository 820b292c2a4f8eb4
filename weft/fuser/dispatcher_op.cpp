// The functional forward and backward (functional.h) as dispatcher ops, for torch.compile, torch.export, AOTInductor
// and dispatch modes. `inputs` are x, the extra inputs and the parameters, in the order of the pipeline text. Lists are
// never empty, because AOTInductor passes None for an empty list. Results never alias inputs: aliases are copied, and a
// saved slot that holds x or a parameter itself is an empty tensor, since backward receives those as inputs.
//
// Compilers merge equal calls. Those that draw random numbers or add to a main_grad are ops of their own with a number,
// `call`, which nobody reads and which differs between them. Their `x`, the first of the inputs, shows torch the device
// of the random numbers that it saves for a recomputation.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "weft/fuser/call_validation.h"
#include "weft/fuser/functional.h"
#include "weft/fuser/graph_task.h"
#include "weft/ops/wgrad_attrs.h"
#include "weft/ops/wgrad_handle.h"
#include "weft/quant/recipe.h"

namespace weft::fuser {
namespace {

using List = std::vector<at::Tensor>;

bool shares_memory(const at::Tensor& t, at::TensorList others) {
  for (const auto& other : others)
    if (other.defined() && t.storage().is_alias_of(other.storage())) return true;
  return false;
}

/// `t` as a contiguous tensor that shares no memory with `others`.
at::Tensor own_copy(const at::Tensor& t, at::TensorList others) {
  const auto dense = t.contiguous();
  return shares_memory(dense, others) ? dense.clone() : dense;
}

/// `inputs` of the dispatcher ops, split.
struct Inputs {
  at::Tensor x;
  at::TensorList extras, params;
};

Inputs split(const Pipeline& pipeline, at::TensorList inputs) {
  const auto extras = pipeline.caller_inputs().size(), params = pipeline.params().size();
  TORCH_CHECK_VALUE(inputs.size() == 1 + extras + params, "Pipeline: expected ", 1 + extras + params,
                    " tensors (the input, ", extras, " extra inputs, ", params, " parameters), got ", inputs.size(),
                    ".");
  return {inputs[0], inputs.slice(1, extras), inputs.slice(1 + extras, params)};
}

/// Raises in a region of another recipe, or of any if the program has none: its text fixes the recipe. Calls that a
/// backward repeats run outside of their region.
void check_active_recipe(const Program& p) {
  const auto active = quant::active_recipe(), own = p.plan->key.recipe();
  if (active == 0 || active == own || !p.pipeline->quantizes() || in_backward()) return;
  TORCH_CHECK(false, "weft: a program that was exported ", own ? "with another recipe" : "without a recipe",
              " is called in a region of torchweft.autocast, which cannot change it. Export it within that region, or "
              "call it outside of the region or in autocast(enabled=False).");
}

List pipeline_forward(at::TensorList inputs, c10::string_view text) {
  const auto p = program(text);
  check_active_recipe(p);
  const auto [x, extras, params] = split(*p.pipeline, inputs);
  reject_tangents(inputs);
  auto out = forward(x, params, extras, text);
  List results, must_not_alias = inputs.vec();
  const auto add = [&](const at::Tensor& t) {
    results.push_back(own_copy(t, must_not_alias));
    must_not_alias.push_back(results.back());
  };
  for (const auto& y : out.outputs) add(y);
  for (size_t k = 0; k < out.saved.size(); ++k) {
    const bool stored = out.saved[k].defined() && out.shapes.saved[k].is_stored();
    add(stored ? out.saved[k] : at::empty({0}, x.options()));
  }
  return results;
}

/// The Parameters of a call. The `main_grad` of each must be among `main_grads`, which the op declares as mutated.
class DeclaredLeafParams final : public ops::LeafParams {
 public:
  DeclaredLeafParams(at::TensorList params, at::TensorList main_grads) : params_(params), main_grads_(main_grads) {}

  at::Tensor leaf(int p) const override {
    const auto& param = params_[p];
    if (!param.is_leaf()) return {};
    const auto target = ops::wgrad_resolver(param).resolve(param, /*fetch=*/false).main_grad;
    const bool declared =
        std::any_of(main_grads_.begin(), main_grads_.end(), [&](const at::Tensor& t) { return t.is_same(target); });
    TORCH_CHECK_VALUE(!target.defined() || declared, "weft: parameter ", p,
                      " accumulates into a main_grad that is missing in the main_grads argument of the call.");
    return param;
  }
  int64_t graph_task_id() const override { return outermost_graph_task_id(); }

 private:
  at::TensorList params_, main_grads_;
};

/// Whether each input of a call requires a gradient.
std::vector<bool> required(const Program& program) {
  std::vector<bool> list;
  for (int i = 0; i < program.plan->key.num_tensors(); ++i)
    list.push_back(program.plan->key.tensor_meta(i).requires_grad);
  return list;
}

/// Gradients in the order of the inputs. A missing gradient is a tensor of zeros if `returned`, else an empty tensor.
List differentiate(const c10::List<std::optional<at::Tensor>>& grads, at::TensorList tensors, const Program& p,
                   const ops::LeafParams* leaf_params, const std::vector<bool>& returned) {
  const size_t count = 1 + p.pipeline->caller_inputs().size() + p.pipeline->params().size();
  const auto inputs = tensors.slice(0, std::min(count, tensors.size()));
  const auto [x, extras, params] = split(*p.pipeline, inputs);
  List dy;
  for (size_t k = 0; k < grads.size(); ++k) {
    const std::optional<at::Tensor> grad = grads.get(k);
    dy.push_back(grad.value_or(at::Tensor()));
  }
  // In the order x, parameters, extra inputs.
  const auto computed = backward(dy, tensors.slice(count), x, params, extras, p.text, leaf_params);
  List out, must_not_alias = tensors.vec();
  must_not_alias.insert(must_not_alias.end(), dy.begin(), dy.end());
  for (size_t i = 0; i < count; ++i) {
    const auto from = i == 0 ? 0 : i <= extras.size() ? params.size() + i : i - extras.size();
    if (computed[from].defined())
      out.push_back(own_copy(computed[from].to(inputs[i].scalar_type()), must_not_alias));
    else
      out.push_back(returned[i] ? at::zeros(inputs[i].sizes(), inputs[i].options())
                                : at::empty({0}, inputs[i].options()));
    must_not_alias.push_back(out.back());
  }
  return out;
}

List pipeline_backward(const c10::List<std::optional<at::Tensor>>& grads, at::TensorList tensors,
                       c10::string_view text) {
  const auto p = program(text);
  return differentiate(grads, tensors, p, nullptr, required(p));
}

List pipeline_backward_into(const c10::List<std::optional<at::Tensor>>& grads, at::TensorList tensors,
                            at::TensorList params, at::TensorList main_grads, c10::string_view text) {
  const auto p = program(text);
  const auto expected = p.pipeline->params().size();
  TORCH_CHECK_VALUE(params.size() == expected, "Pipeline: expected ", expected, " leaf parameters, got ", params.size(),
                    ".");
  const DeclaredLeafParams leaf_params(params, main_grads);
  return differentiate(grads, tensors, p, &leaf_params, std::vector<bool>(tensors.size()));
}

/// The Parameters that handles name: of each parameter that accumulates into main_grad and needs a gradient, in order.
class NamedLeafParams final : public ops::LeafParams {
 public:
  NamedLeafParams(const Program& program, at::TensorList handles) : leaves_(program.pipeline->params().size()) {
    const auto accumulates = accumulates_into_main_grad(*program.pipeline);
    const auto first = 1 + program.pipeline->caller_inputs().size();
    for (size_t p = 0; p < accumulates.size(); ++p)
      if (accumulates[p] && program.plan->key.tensor_meta(static_cast<int>(first + p)).requires_grad)
        named_.push_back(p);
    TORCH_CHECK_VALUE(named_.size() == handles.size(), "Pipeline: expected ", named_.size(), " main_grad handles, got ",
                      handles.size(), ".");
    for (size_t i = 0; i < named_.size(); ++i) leaves_[named_[i]] = ops::parameter_of(handles[i]);
  }

  /// Raises if a handle does not name the parameter of the call: a Parameter may have the handle of another one whose
  /// attributes were copied.
  void check_names(at::TensorList params) const {
    for (const auto p : named_) {
      const auto &leaf = leaves_[p], &param = params[p];
      const bool same_values = leaf.const_data_ptr() == param.const_data_ptr() && leaf.sizes() == param.sizes();
      // A compiler detaches a Parameter for which it expects no gradient.
      TORCH_CHECK(leaf.is_same(param) || (same_values && !param.requires_grad()), "weft: the weight of shape ",
                  param.sizes(),
                  " of a compiled call has the main_grad handle of another weight. Delete its attribute "
                  "_main_grad_handle, and compile the module again (torch.compiler.reset()).");
    }
  }

  /// Raises if this backward must not write main_grad, or if a Parameter does not return a dummy gradient as expected.
  void check_backward(const std::vector<bool>& dummies) const {
    TORCH_CHECK_VALUE(dummies.size() == named_.size(), "Pipeline: expected ", named_.size(), " dummies, got ",
                      dummies.size(), ".");
    for (size_t i = 0; i < named_.size(); ++i) {
      const auto& param = leaves_[named_[i]];
      TORCH_CHECK(computes_gradient_of(ops::main_grad_handle(param)),
                  "weft: torch.autograd.grad and backward(inputs=...) are not supported through a compiled call that "
                  "accumulates into main_grad. Use backward() without inputs, or run the module eagerly.");
      const bool has_flag = ops::wgrad_resolver(param).resolve(param, /*fetch=*/false).has_flag;
      TORCH_CHECK(has_flag == dummies[i], "weft: the attribute grad_added_to_main_grad of a weight of shape ",
                  param.sizes(), has_flag ? " was set" : " was deleted",
                  " between forward and backward of a compiled call. Set it before the call.");
    }
  }

  /// Whether the program expects a gradient of each input: those required, but dummies only of accumulated ones.
  std::vector<bool> returned(const Program& program, const std::vector<bool>& dummies) const {
    auto list = required(program);
    const auto first = list.size() - leaves_.size();
    for (size_t i = 0; i < named_.size(); ++i) list[first + named_[i]] = dummies[i];
    return list;
  }

  at::Tensor leaf(int p) const override { return leaves_[p]; }
  int64_t graph_task_id() const override { return outermost_graph_task_id(); }

 private:
  std::vector<at::Tensor> leaves_;  // undefined for other parameters
  std::vector<size_t> named_;       // parameters with a handle
};

List pipeline_forward_random(const at::Tensor& /*x*/, at::TensorList inputs, c10::string_view text, int64_t /*call*/) {
  return pipeline_forward(inputs, text);
}

List pipeline_forward_with_handles(const at::Tensor& /*x*/, at::TensorList inputs, at::TensorList handles,
                                   const c10::List<bool>& /*dummies*/, c10::string_view text, int64_t /*call*/) {
  const auto p = program(text);
  NamedLeafParams(p, handles).check_names(split(*p.pipeline, inputs).params);
  return pipeline_forward(inputs, text);
}

/// Gradients of the inputs, then of the handles: zeros.
List pipeline_backward_with_handles(const c10::List<std::optional<at::Tensor>>& grads, at::TensorList tensors,
                                    at::TensorList handles, const c10::List<bool>& dummies, c10::string_view text,
                                    int64_t /*call*/) {
  const auto p = program(text);
  const NamedLeafParams leaf_params(p, handles);
  const std::vector<bool> has_dummy(dummies.begin(), dummies.end());
  leaf_params.check_backward(has_dummy);
  auto out = differentiate(grads, tensors, p, &leaf_params, leaf_params.returned(p, has_dummy));
  for (const auto& handle : handles) out.push_back(at::zeros(handle.sizes(), handle.options()));
  return out;
}

}  // namespace

TORCH_LIBRARY(weft, m) {
  m.def("pipeline_forward(Tensor[] inputs, str text) -> Tensor[]", {at::Tag::pt2_compliant_tag});
  m.def("pipeline_backward(Tensor?[] grads, Tensor[] inputs_and_saved, str text) -> Tensor[]",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "pipeline_backward_into(Tensor?[] grads, Tensor[] inputs_and_saved, Tensor[] params, Tensor(a!)[] main_grads, "
      "str text) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  m.def("pipeline_forward_random(Tensor x, Tensor[] inputs, str text, int call) -> Tensor[]",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def(
      "pipeline_forward_with_handles(Tensor x, Tensor[] inputs, Tensor[] handles, bool[] dummies, str text, int call) "
      "-> Tensor[]",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def(
      "pipeline_backward_with_handles(Tensor?[] grads, Tensor[] inputs_and_saved, Tensor[] handles, bool[] dummies, "
      "str text, int call) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(weft, CompositeExplicitAutograd, m) {
  m.impl("pipeline_forward", &pipeline_forward);
  m.impl("pipeline_backward", &pipeline_backward);
  m.impl("pipeline_backward_into", &pipeline_backward_into);
  m.impl("pipeline_forward_random", &pipeline_forward_random);
  m.impl("pipeline_forward_with_handles", &pipeline_forward_with_handles);
  m.impl("pipeline_backward_with_handles", &pipeline_backward_with_handles);
}

}  // namespace weft::fuser
