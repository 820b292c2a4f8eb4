// The functional forward and backward (functional.h) as dispatcher ops, for torch.compile, torch.export, AOTInductor
// and dispatch modes. `inputs` are x, the extra inputs and the parameters, in the order of the pipeline text. Lists are
// never empty, because AOTInductor passes None for an empty list. Results never alias inputs: aliases are copied, and a
// saved slot that holds x or a parameter itself is an empty tensor, since backward receives those as inputs.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "weft/fuser/call_validation.h"
#include "weft/fuser/functional.h"
#include "weft/fuser/graph_task.h"
#include "weft/ops/wgrad_attrs.h"

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

List pipeline_forward(at::TensorList inputs, c10::string_view text) {
  const auto p = program(text);
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
  size_t size() const { return params_.size(); }

 private:
  at::TensorList params_, main_grads_;
};

/// Gradients in the order of the inputs. A needed gradient that is zero is a tensor of zeros without `leaf_params`.
/// Other missing gradients, those not needed or written to main_grad, are empty tensors.
List differentiate(const c10::List<std::optional<at::Tensor>>& grads, at::TensorList tensors, c10::string_view text,
                   const DeclaredLeafParams* leaf_params) {
  const auto p = program(text);
  const size_t count = 1 + p.pipeline->caller_inputs().size() + p.pipeline->params().size();
  const auto inputs = tensors.slice(0, std::min(count, tensors.size()));
  const auto [x, extras, params] = split(*p.pipeline, inputs);
  List dy;
  for (size_t k = 0; k < grads.size(); ++k) {
    const std::optional<at::Tensor> grad = grads.get(k);
    dy.push_back(grad.value_or(at::Tensor()));
  }
  TORCH_CHECK_VALUE(!leaf_params || leaf_params->size() == params.size(), "Pipeline: expected ", params.size(),
                    " leaf parameters, got ", leaf_params ? leaf_params->size() : 0, ".");
  // In the order x, parameters, extra inputs.
  const auto computed = backward(dy, tensors.slice(count), x, params, extras, text, leaf_params);
  List out, must_not_alias = tensors.vec();
  must_not_alias.insert(must_not_alias.end(), dy.begin(), dy.end());
  for (size_t i = 0; i < count; ++i) {
    const auto from = i == 0 ? 0 : i <= extras.size() ? params.size() + i : i - extras.size();
    const bool zero = !leaf_params && p.plan->key.tensor_meta(static_cast<int>(i)).requires_grad;
    if (computed[from].defined())
      out.push_back(own_copy(computed[from].to(inputs[i].scalar_type()), must_not_alias));
    else
      out.push_back(zero ? at::zeros(inputs[i].sizes(), inputs[i].options()) : at::empty({0}, inputs[i].options()));
    must_not_alias.push_back(out.back());
  }
  return out;
}

List pipeline_backward(const c10::List<std::optional<at::Tensor>>& grads, at::TensorList tensors,
                       c10::string_view text) {
  return differentiate(grads, tensors, text, nullptr);
}

List pipeline_backward_into(const c10::List<std::optional<at::Tensor>>& grads, at::TensorList tensors,
                            at::TensorList params, at::TensorList main_grads, c10::string_view text) {
  const DeclaredLeafParams leaf_params(params, main_grads);
  return differentiate(grads, tensors, text, &leaf_params);
}

}  // namespace

TORCH_LIBRARY(weft, m) {
  m.def("pipeline_forward(Tensor[] inputs, str text) -> Tensor[]",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def("pipeline_backward(Tensor?[] grads, Tensor[] inputs_and_saved, str text) -> Tensor[]",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "pipeline_backward_into(Tensor?[] grads, Tensor[] inputs_and_saved, Tensor[] params, Tensor(a!)[] main_grads, "
      "str text) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(weft, CompositeExplicitAutograd, m) {
  m.impl("pipeline_forward", &pipeline_forward);
  m.impl("pipeline_backward", &pipeline_backward);
  m.impl("pipeline_backward_into", &pipeline_backward_into);
}

}  // namespace weft::fuser
