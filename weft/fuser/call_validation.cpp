#include "weft/fuser/call_validation.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "weft/core/dispatch_keys.h"
#include "weft/fused/rules.h"
#include "weft/kernels/packing.h"
#include "weft/quant/recipe.h"

namespace weft::fuser {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

const char* unsupported_layout(const at::Tensor& t) {
  if (t.is_nested()) return "a nested tensor";
  if (t.is_mkldnn()) return "an MKL-DNN tensor";
  if (t.is_quantized()) return "a quantized tensor";
  if (t.layout() != at::kStrided) return "a sparse tensor";
  return nullptr;
}

[[noreturn]] void reject(const std::string& what, const at::Tensor& t) {
  const auto keys = t.key_set();
  if (keys.has_any(kFunctorchKeys))
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "weft: ", what,
        " is a functorch wrapper (vmap, grad, jvp, functionalize). weft operations do not support function "
        "transforms; call them outside the transform, or use torch.autograd.");
  if (keys.has_any(kPythonKeys))
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "weft: ", what,
        " is a tensor subclass with Python dispatch (such as DTensor or FakeTensor); expected a dense tensor with "
        "storage. With FSDP2, call the module that fully_shard wrapped, so that its parameters are gathered; under "
        "torch.compile or FakeTensorMode, use torch.ops.weft.pipeline_forward.");
  TORCH_CHECK_TYPE(!t.is_complex(), "weft: ", what, " is ", dtype_name(t.scalar_type()), "; expected ", kComputeDtypes,
                   ". Pass its real and imaginary parts separately.");
  TORCH_CHECK_TYPE(false, "weft: ", what, " is ", unsupported_layout(t), "; expected a dense strided tensor.");
}

bool is_supported_tensor(const at::Tensor& t) {
  return !t.key_set().has_any(kPythonKeys | kFunctorchKeys) && !unsupported_layout(t) && !t.is_complex();
}

void check_tangent(const std::string& what, const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !t.defined() || !t._fw_grad(0).defined(), "weft: ", what,
      " carries a forward-mode tangent; weft operations do not implement jvp. Use reverse mode, or compute the "
      "tangent with torch operations.");
}

bool forward_mode() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

void check_tangents(const Pipeline& pipeline, const at::Tensor& x, ops::Params params,
                    c10::ArrayRef<at::Tensor> extras) {
  check_tangent("the input", x);
  for (size_t k = 0; k < extras.size(); ++k) check_tangent("extra input " + std::to_string(k), extras[k]);
  for (size_t p = 0; p < params.size(); ++p) check_tangent(param_name(pipeline, static_cast<int>(p)), params[p]);
}

constexpr DispatchKeySet kUnsupportedModes({DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::Tracer});

/// The fast check; `reject_param` raises the specific error.
bool param_fits(const ops::ParamSpec& spec, const at::Tensor& param, const at::Tensor& x) {
  return param.defined() && is_supported_tensor(param) && param.device() == x.device() &&
         (spec.any_shape || (param.sizes() == at::IntArrayRef(spec.shape) && is_compute_dtype(param.scalar_type())));
}

[[noreturn]] void reject_param(const Pipeline& pipeline, int p, const at::Tensor& param, const at::Tensor& x) {
  const auto name = param_name(pipeline, p);
  const auto& spec = pipeline.params()[p];
  TORCH_CHECK_VALUE(param.defined(), "weft: ", name, " is an undefined tensor.");
  if (!is_supported_tensor(param)) reject(name, param);
  TORCH_CHECK_VALUE(param.device() == x.device(), "weft: the input is on ", x.device(), ", ", name, " is on ",
                    param.device(), "; expected the same device. ",
                    param.is_meta() ? "Materialize it first: module.to_empty(device=…), then reset_parameters()."
                                    : "Move one of them with .to(device).");
  TORCH_CHECK_VALUE(param.sizes() == at::IntArrayRef(spec.shape), "weft: ", name, " has shape ", param.sizes(),
                    ", expected ", at::IntArrayRef(spec.shape), ". To change the sizes, create a new module.");
  TORCH_CHECK_TYPE(false, "weft: ", name, " is ", dtype_name(param.scalar_type()), "; expected ", kComputeDtypes, ".");
}

void check_param(const Pipeline& pipeline, int p, const at::Tensor& param, const at::Tensor& x) {
  if (!param_fits(pipeline.params()[p], param, x)) reject_param(pipeline, p, param, x);
}

/// Raises for a frozen weight (torchweft.prepack) that has changed.
void check_frozen(ops::Params params) {
  if (!kernels::any_frozen()) return;
  for (const auto& param : params) kernels::check_frozen(param);
}

void check_extra(int k, const at::Tensor& extra, const at::Tensor& x) {
  TORCH_CHECK_VALUE(extra.defined(), "weft: extra input ", k, " is an undefined tensor.");
  if (!is_supported_tensor(extra)) reject("extra input " + std::to_string(k), extra);
  TORCH_CHECK_VALUE(extra.device() == x.device(), "weft: extra input ", k, " is on ", extra.device(),
                    ", the input is on ", x.device(), "; expected the same device.");
}

void check_tensor_meta(const std::string& what, const at::Tensor& t, const fused::TensorMeta& meta) {
  TORCH_CHECK_VALUE(t.scalar_type() == meta.dtype && t.device().type() == meta.device, "weft: ", what, " is ",
                    dtype_name(t.scalar_type()), " on ", t.device(), ", the pipeline text expects ",
                    dtype_name(meta.dtype), " on ", c10::DeviceTypeName(meta.device, /*lower_case=*/true), ".");
}

at::ScalarType autocast_dtype(c10::DeviceType device) {
  if (!at::autocast::is_autocast_enabled(device)) return at::ScalarType::Undefined;
  return at::autocast::get_autocast_dtype(device);
}

bool supports_autocast(c10::DeviceType device) { return device != c10::DeviceType::Meta; }

/// "0 extra inputs", "1 extra input (Sequential[5] AddExtraInput)"
std::string extra_inputs_text(const Pipeline& pipeline) {
  std::string list;
  for (const int slot : pipeline.caller_inputs()) {
    list += (list.empty() ? "" : ", ") + pipeline.label(pipeline.consumer(slot));
  }
  const auto count = pipeline.caller_inputs().size();
  return std::to_string(count) + (count == 1 ? " extra input" : " extra inputs") +
         (list.empty() ? "" : " (" + list + ")");
}

}  // namespace

std::string param_name(const Pipeline& pipeline, int index) {
  for (int i = 0; i < pipeline.size(); ++i)
    if (index < pipeline.param_base(i + 1))
      return "parameter '" + pipeline.params()[index].name + "' of " + pipeline.label(i);
  return "parameter " + std::to_string(index);
}

void check_modes() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  if (!included.has_any(kUnsupportedModes)) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !included.has(DispatchKey::Tracer),
      "weft: torch.jit.trace is not supported: it would record the results of weft operations as constants. Use "
      "torch.export.export or torch.compile, and for ONNX torch.onnx.export(..., dynamo=True).");
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "weft: called inside a torch.func transform (grad, vmap, jvp …), which weft operations do not support. Call "
      "them outside the transform, or use torch.autograd.");
}

void check_counts(const Pipeline& pipeline, size_t params, size_t extras) {
  const auto owner = [&] {
    const bool one_label = pipeline.size() > 0 && pipeline.labels(0, pipeline.size()) == pipeline.label(0);
    return one_label ? pipeline.label(0) : std::string("Pipeline");
  };
  TORCH_CHECK_VALUE(extras == pipeline.caller_inputs().size(), owner(), ": expected ", extra_inputs_text(pipeline),
                    ", got ", extras, ". Pass extra inputs after x, in this order.");
  TORCH_CHECK_VALUE(params == pipeline.params().size(), "Pipeline: expected ", pipeline.params().size(),
                    " parameters, got ", params, ".");
}

void check_against_key(const Pipeline& pipeline, const fused::PlanKey& key, const at::Tensor& x, ops::Params params,
                       c10::ArrayRef<at::Tensor> extras) {
  TORCH_CHECK_VALUE(x.defined(), "weft: the input is an undefined tensor.");
  check_counts(pipeline, params.size(), extras.size());
  if (!is_supported_tensor(x)) reject("the input", x);
  check_tensor_meta("the input", x, key.tensor_meta(0));
  const int num_extras = static_cast<int>(extras.size());
  for (int k = 0; k < num_extras; ++k) {
    check_extra(k, extras[k], x);
    check_tensor_meta("extra input " + std::to_string(k), extras[k], key.tensor_meta(1 + k));
  }
  for (int p = 0; p < static_cast<int>(params.size()); ++p) {
    check_param(pipeline, p, params[p], x);
    check_tensor_meta(param_name(pipeline, p), params[p], key.tensor_meta(1 + num_extras + p));
  }
  check_frozen(params);
}

fused::PlanKey make_plan_key(const Pipeline& pipeline, const at::Tensor& x, ops::Params params,
                             c10::ArrayRef<at::Tensor> extras, uint64_t eval_mask) {
  TORCH_CHECK_VALUE(x.defined(), "weft: the input is an undefined tensor.");
  check_counts(pipeline, params.size(), extras.size());
  const bool grad_mode = c10::GradMode::is_enabled();
  const auto device = x.device().type();
  fused::PlanKey key(grad_mode, supports_autocast(device) ? autocast_dtype(device) : at::ScalarType::Undefined,
                     pipeline.quantizes() ? quant::active_recipe() : 0, fused::rules_version(), eval_mask);
  if (!is_supported_tensor(x))
    reject("the input of " + (pipeline.size() > 0 ? pipeline.label(0) : std::string("an empty pipeline")), x);
  key.add(fused::TensorMeta::of(x, grad_mode).pack());
  for (size_t k = 0; k < extras.size(); ++k) {
    check_extra(static_cast<int>(k), extras[k], x);
    key.add(fused::TensorMeta::of(extras[k], grad_mode).pack());
  }
  for (size_t p = 0; p < params.size(); ++p) {
    check_param(pipeline, static_cast<int>(p), params[p], x);
    key.add(fused::TensorMeta::of(params[p], grad_mode).pack());
  }
  check_frozen(params);
  if (forward_mode()) check_tangents(pipeline, x, params, extras);
  check_modes();
  return key;
}

void check_buffers(const Pipeline& pipeline, const ops::Buffers& given) {
  TORCH_CHECK_INDEX(given.op >= 0 && given.op < pipeline.size(), "weft: buffers were passed for operation ", given.op,
                    ", but the pipeline has ", pipeline.size(), " operations.");
  const auto& op = pipeline.op(given.op);
  const auto& label = pipeline.label(given.op);
  const bool results = given.output.defined() || given.grad_input.defined();
  TORCH_CHECK_VALUE(results ? op.takes_buffers() : op.quantizes(), "weft: ", label, " does not take buffers.");
  for (const auto& [what, t] : {std::pair{"output", &given.output}, std::pair{"grad_input", &given.grad_input}}) {
    if (!t->defined()) continue;
    if (!is_supported_tensor(*t)) reject(std::string("buffer '") + what + "' of " + label, *t);
    TORCH_CHECK_VALUE(t->is_contiguous() && !t->requires_grad(), label, ": buffer '", what, "' has shape ", t->sizes(),
                      ", strides ", t->strides(), t->requires_grad() ? " and requires grad" : "",
                      "; expected a contiguous tensor that does not require grad. Pass buffer.detach().");
  }
}

void reject_tangents(c10::ArrayRef<at::Tensor> tensors) {
  if (!forward_mode()) return;
  for (const auto& t : tensors) check_tangent("an input", t);
}

void check_gradients(c10::ArrayRef<at::Tensor> grads, const char* what) {
  const bool tangents = forward_mode();
  for (const auto& grad : grads) {
    if (!grad.defined()) continue;
    if (!is_supported_tensor(grad)) reject(what, grad);
    if (tangents) check_tangent(what, grad);
  }
}

}  // namespace weft::fuser
