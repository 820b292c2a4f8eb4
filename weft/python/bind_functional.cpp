#include <c10/core/impl/LocalDispatchKeySet.h>

#include "weft/fuser/call_validation.h"
#include "weft/fuser/functional.h"
#include "weft/python/module.h"

// `text` is the text of a pipeline. Functions that use fuser::program also require the kind of call at its end:
// `GELU(approximate="tanh") @call(autocast=none, eval=0, tensors="cpu:float32:gc")`.

namespace weft::python {
namespace {

/// In Python a Spec is a tuple (sizes, dtype); sizes may be symbolic.
ops::Spec spec_from(const py::tuple& pair) {
  ops::Spec spec;
  for (const auto size : pair[0]) spec.sizes.push_back(size.cast<c10::SymInt>());
  spec.dtype = pair[1].cast<at::ScalarType>();
  return spec;
}

py::tuple tuple_of(const ops::Spec& spec) {
  py::list sizes;
  for (const auto& size : spec.sizes) sizes.append(py::cast(size));
  return py::make_tuple(sizes, py::cast(spec.dtype));
}

/// Infers the shapes of a call from the specs of its `inputs`: x, extra inputs, parameters.
fuser::CallShapes shapes_of(const fuser::Program& program, const py::list& inputs) {
  const auto extras = program.pipeline->caller_inputs().size();
  TORCH_CHECK_VALUE(inputs.size() >= 1 + extras, "Pipeline: expected at least ", 1 + extras, " tensors (the input, ",
                    extras, " extra inputs), got ", inputs.size(), ".");
  std::vector<ops::Spec> specs;
  for (const auto item : inputs) specs.push_back(spec_from(item.cast<py::tuple>()));
  const auto begin = specs.begin() + 1, end = begin + static_cast<int64_t>(extras);
  return fuser::infer(*program.pipeline, *program.plan, specs[0], {end, specs.end()}, {begin, end});
}

/// Specs of the results of weft::pipeline_forward: outputs, then saved slots; None for a slot that is an empty tensor.
py::list infer(const std::string& text, const py::list& inputs) {
  const auto shapes = shapes_of(fuser::program(text), inputs);
  py::list results;
  for (const auto& spec : shapes.outputs) results.append(tuple_of(spec));
  for (const auto& slot : shapes.saved)
    results.append(slot.is_stored() ? py::object(tuple_of(*slot.spec)) : py::none());
  return results;
}

/// For each input: its name in error messages, whether the call computes its gradient, and whether that is accumulated
/// into main_grad.
py::list gradients(const std::string& text) {
  const auto program = fuser::program(text);
  const int extras = static_cast<int>(program.pipeline->caller_inputs().size());
  const auto& key = program.plan->key;
  const auto accumulated = fuser::accumulates_into_main_grad(*program.pipeline);
  py::list list;
  for (int i = 0; i < key.num_tensors(); ++i) {
    const auto name = i == 0        ? std::string("the input")
                      : i <= extras ? "extra input " + std::to_string(i - 1)
                                    : fuser::param_name(*program.pipeline, i - 1 - extras);
    list.append(py::make_tuple(name, key.tensor_meta(i).requires_grad, i > extras && accumulated[i - 1 - extras]));
  }
  return list;
}

/// FLOPs of a call from the sizes of its inputs, which have the dtypes of the program.
py::tuple flops(const std::string& text, const py::list& sizes) {
  const auto program = fuser::program(text);
  py::list inputs;
  for (size_t i = 0; i < sizes.size(); ++i)
    inputs.append(py::make_tuple(sizes[i], program.plan->key.tensor_meta(static_cast<int>(i)).dtype));
  const auto shapes = shapes_of(program, inputs);
  return py::make_tuple(shapes.flops.forward, shapes.flops.backward);
}

std::vector<bool> outputs_require_grad(const std::string& text) {
  const auto program = fuser::program(text);
  std::vector<bool> list{program.plan->output_requires_grad};
  for (const int slot : program.pipeline->caller_outputs())
    list.push_back(program.plan->extra_out_requires_grad[slot] != 0);
  return list;
}

}  // namespace

void bind_functional(py::module_& m) {
  m.def(
      "normalize_text", [](const std::string& text) { return fuser::Pipeline::parse(text).text(); }, py::arg("text"),
      "Parses the text of a pipeline and returns it in canonical form.");
  m.def(
      "outputs_require_grad", &outputs_require_grad, py::arg("text"),
      "For each output among the results of weft::pipeline_forward, whether it requires a gradient; the other results "
      "are saved for backward.");
  m.def(
      "num_params", [](const std::string& text) { return fuser::program(text).pipeline->params().size(); },
      py::arg("text"), "The number of parameters among the inputs of weft::pipeline_forward; they come last.");
  m.def(
      "accumulates_into_main_grad",
      [](const std::string& text) { return fuser::accumulates_into_main_grad(fuser::Pipeline::parse(text)); },
      py::arg("text"), "For each parameter of a pipeline, whether its gradient is accumulated into main_grad.");
  m.def("infer", &infer, py::arg("text"), py::arg("inputs"),
        "Specs of the results of a call; a tensor is given as (sizes, dtype).");
  m.def("gradients", &gradients, py::arg("text"),
        "For each input of a call: its name, whether the call computes its gradient, whether into main_grad.");
  m.def("flops", &flops, py::arg("text"), py::arg("sizes"),
        "Floating-point operations of the GEMMs in forward and backward; `sizes` are those of the inputs.");
  m.def("enabled_joint_rules", &fuser::enabled_joint_rules,
        "The names of the library's own joint fusions that are enabled, separated by spaces.");
  m.def(
      "check_transforms",
      [](const std::vector<at::Tensor>& tensors) {
        fuser::check_modes();
        fuser::reject_tangents(tensors);
      },
      py::arg("tensors"), "Raises inside torch.jit.trace or a torch.func transform, or for a forward-mode tangent.");
  m.def(
      "dispatch_mode_active", [] { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python); },
      "Whether a TorchDispatchMode is active on this thread.");
}

}  // namespace weft::python
