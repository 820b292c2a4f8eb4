// The functional pair as dispatcher ops, for torch.compile, export and AOTInductor. Outputs of an op must be memory of
// their own, so results that share memory with an input are copied, and a saved slot that keeps x itself is an empty
// tensor here: backward takes x and puts it back.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "weft/fuser/door.h"
#include "weft/fuser/functional.h"
#include "weft/fuser/infer.h"

namespace weft::fuser {
namespace {

using List = std::vector<at::Tensor>;

bool shares_memory(const at::Tensor& t, at::TensorList others) {
  for (const auto& other : others)
    if (other.defined() && t.storage().is_alias_of(other.storage())) return true;
  return false;
}

/// `t` in contiguous memory of its own.
at::Tensor own(const at::Tensor& t, at::TensorList others) {
  const auto dense = t.contiguous();
  return shares_memory(dense, others) ? dense.clone() : dense;
}

std::tuple<List, List> pipeline_forward(const at::Tensor& x, at::TensorList params, at::TensorList extras,
                                        c10::string_view text) {
  const auto p = program(text);
  refuse_tangents({x});
  refuse_tangents(params);
  refuse_tangents(extras);
  const auto shapes = infer(*p.pipeline, *p.plan, x, params, extras);
  auto out = forward(x, params, extras, text);
  List inputs{x};
  inputs.insert(inputs.end(), params.begin(), params.end());
  inputs.insert(inputs.end(), extras.begin(), extras.end());
  for (auto& y : out.outputs) inputs.push_back(y = own(y, inputs));
  for (size_t k = 0; k < out.saved.size(); ++k) {
    auto& t = out.saved[k];
    const bool given_again = shapes.saved[k].keeps_value_of == -1;
    t = t.defined() && !given_again ? own(t, inputs) : at::empty({0}, x.options());
    inputs.push_back(t);
  }
  return {std::move(out.outputs), std::move(out.saved)};
}

List pipeline_backward(const c10::List<std::optional<at::Tensor>>& grads, at::TensorList saved, const at::Tensor& x,
                       at::TensorList params, at::TensorList extras, c10::string_view text) {
  const auto p = program(text);
  const auto shapes = infer(*p.pipeline, *p.plan, x, params, extras);
  List kept(saved.begin(), saved.end()), dy;
  for (size_t k = 0; k < kept.size(); ++k) {
    const auto& slot = shapes.saved[k];
    if (!slot.spec) kept[k].reset();
    if (slot.spec && slot.keeps_value_of == -1) kept[k] = x.reshape_symint(slot.spec->sizes);
  }
  for (size_t k = 0; k < grads.size(); ++k) {
    const std::optional<at::Tensor> grad = grads.get(k);
    dy.push_back(grad.value_or(at::Tensor()));
  }
  auto out = backward(dy, kept, params, text);
  List inputs{x}, others(dy);
  inputs.insert(inputs.end(), params.begin(), params.end());
  inputs.insert(inputs.end(), extras.begin(), extras.end());
  others.insert(others.end(), inputs.begin(), inputs.end());
  others.insert(others.end(), saved.begin(), saved.end());
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = out[i].defined() ? own(out[i].to(inputs[i].scalar_type()), others)
                              : at::zeros(inputs[i].sizes(), inputs[i].options());
    others.push_back(out[i]);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(weft, m) {
  m.def("pipeline_forward(Tensor x, Tensor[] params, Tensor[] extras, str text) -> (Tensor[] outputs, Tensor[] saved)",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def(
      "pipeline_backward(Tensor?[] grads, Tensor[] saved, Tensor x, Tensor[] params, Tensor[] extras, str text) -> "
      "Tensor[]",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(weft, CompositeExplicitAutograd, m) {
  m.impl("pipeline_forward", &pipeline_forward);
  m.impl("pipeline_backward", &pipeline_backward);
}

}  // namespace weft::fuser
