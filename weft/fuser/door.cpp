#include "weft/fuser/door.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "weft/fused/rules.h"

namespace weft::fuser {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr DispatchKeySet kPython({DispatchKey::Python, DispatchKey::PythonTLSSnapshot});
constexpr DispatchKeySet kFunctorch({DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                                     DispatchKey::BatchedNestedTensor, DispatchKey::FuncTorchVmapMode,
                                     DispatchKey::Batched, DispatchKey::Functionalize});

const char* unusual_layout(const at::Tensor& t) {
  if (t.is_nested()) return "a nested tensor";
  if (t.is_mkldnn()) return "an MKL-DNN tensor";
  if (t.is_quantized()) return "a quantized tensor";
  if (t.layout() != at::kStrided) return "a sparse tensor";
  return nullptr;
}

[[noreturn]] void refuse(const std::string& what, const at::Tensor& t) {
  const auto keys = t.key_set();
  if (keys.has_any(kFunctorch))
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "weft: ", what,
        " is a functorch wrapper (vmap, grad, jvp, functionalize). weft's operations do not "
        "support function transforms; call them outside of the transform, or use torch.autograd.");
  if (keys.has_any(kPython))
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "weft: ", what, " is a tensor subclass with its own dispatch in Python (",
        "DTensor, FakeTensor or the like), which has no memory weft could read. With FSDP2, call the module "
        "that fully_shard wrapped, so that its parameters are gathered; under torch.compile or FakeTensorMode, "
        "go through torch.ops.weft.pipeline.");
  TORCH_CHECK(!t.is_complex(), "weft: Unsupported dtype ", dtype_name(t.scalar_type()), " of ", what,
              "; expected real numbers.");
  TORCH_CHECK_TYPE(false, "weft: ", what, " is ", unusual_layout(t), "; expected a dense strided tensor.");
}

bool usual(const at::Tensor& t) {
  return !t.key_set().has_any(kPython | kFunctorch) && !unusual_layout(t) && !t.is_complex();
}

std::string param_name(const Pipeline& pipeline, int index) {
  for (int i = 0; i < pipeline.size(); ++i)
    if (index < pipeline.param_base(i + 1))
      return "parameter '" + pipeline.params()[index].name + "' of operation " + std::to_string(i) + " (" +
             std::string(pipeline.op(i).name()) + ")";
  return "parameter " + std::to_string(index);
}

void check_tangent(const std::string& what, const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !t.defined() || !t._fw_grad(0).defined(), "weft: ", what,
      " carries a forward-mode tangent; weft's operations have no jvp. Use reverse mode, or compute the "
      "tangent with plain torch operations.");
}

bool forward_mode() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

void check_tangents(const Pipeline& pipeline, const at::Tensor& x, ops::Params params,
                    c10::ArrayRef<at::Tensor> extras) {
  check_tangent("the input", x);
  for (size_t k = 0; k < extras.size(); ++k) check_tangent("extra input " + std::to_string(k), extras[k]);
  for (size_t p = 0; p < params.size(); ++p) check_tangent(param_name(pipeline, static_cast<int>(p)), params[p]);
}

void check_transform() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode),
      "weft: called inside a function transform of torch.func (grad, vmap, jvp …), which weft's operations do "
      "not support; call them outside of it, or use torch.autograd.");
}

at::ScalarType autocast_dtype(c10::DeviceType device) {
  if (!at::autocast::is_autocast_enabled(device)) return at::ScalarType::Undefined;
  return at::autocast::get_autocast_dtype(device);
}

bool supports_autocast(c10::DeviceType device) { return device != c10::DeviceType::Meta; }

}  // namespace

fused::PlanKey enter(const Pipeline& pipeline, const at::Tensor& x, ops::Params params,
                     c10::ArrayRef<at::Tensor> extras, uint64_t eval_mask) {
  TORCH_CHECK_VALUE(x.defined(), "weft: the input is an undefined tensor.");
  TORCH_CHECK_VALUE(extras.size() == pipeline.caller_inputs().size(), "The pipeline takes ",
                    pipeline.caller_inputs().size(), " extra inputs, got ", extras.size(), ".");
  TORCH_CHECK_VALUE(params.size() == pipeline.params().size(), "The pipeline has ", pipeline.params().size(),
                    " parameters, got ", params.size(), ".");
  const bool grad_mode = c10::GradMode::is_enabled();
  const auto device = x.device().type();
  fused::PlanKey key(grad_mode, supports_autocast(device) ? autocast_dtype(device) : at::ScalarType::Undefined,
                     fused::rules_version(), eval_mask);
  if (!usual(x))
    refuse("the input of " + std::string(pipeline.size() > 0 ? pipeline.op(0).name() : "an empty pipeline"), x);
  key.add(fused::Trait::of(x, grad_mode).pack());
  for (size_t k = 0; k < extras.size(); ++k) {
    TORCH_CHECK_VALUE(extras[k].defined(), "weft: extra input ", k, " is an undefined tensor.");
    if (!usual(extras[k])) refuse("extra input " + std::to_string(k), extras[k]);
    key.add(fused::Trait::of(extras[k], grad_mode).pack());
  }
  for (size_t p = 0; p < params.size(); ++p) {
    const auto& param = params[p];
    TORCH_CHECK_VALUE(param.defined(), "weft: ", param_name(pipeline, static_cast<int>(p)), " is missing.");
    if (!usual(param)) refuse(param_name(pipeline, static_cast<int>(p)), param);
    TORCH_CHECK_VALUE(
        param.device() == x.device(), "weft: the input is on ", x.device(), ", ",
        param_name(pipeline, static_cast<int>(p)), " on ", param.device(), ".",
        param.is_meta() ? " Materialise it first: module.to_empty(device=…), then reset_parameters()." : "");
    key.add(fused::Trait::of(param, grad_mode).pack());
  }
  if (forward_mode()) check_tangents(pipeline, x, params, extras);
  check_transform();
  return key;
}

void check_buffers(const Pipeline& pipeline, const ops::Buffers& given) {
  TORCH_CHECK_INDEX(given.op >= 0 && given.op < pipeline.size(), "weft: buffers for operation ", given.op,
                    ", the pipeline has ", pipeline.size(), ".");
  const auto& op = pipeline.op(given.op);
  TORCH_CHECK_VALUE(op.takes_buffers(), "weft: operation ", given.op, " (", op.name(), ") takes no buffers.");
  for (const auto& [what, t] : {std::pair{"output", &given.output}, std::pair{"grad_input", &given.grad_input}}) {
    if (!t->defined()) continue;
    if (!usual(*t)) refuse(std::string("the buffer '") + what + "' of " + std::string(op.name()), *t);
    TORCH_CHECK_VALUE(t->is_contiguous() && !t->requires_grad(), op.name(), ": the buffer '", what, "' has shape ",
                      t->sizes(), ", strides ", t->strides(), t->requires_grad() ? " and requires a gradient" : "",
                      "; expected a contiguous tensor that requires none: pass buffer.detach().");
  }
}

void refuse_tangents(c10::ArrayRef<at::Tensor> tensors) {
  if (!forward_mode()) return;
  for (const auto& t : tensors) check_tangent("an input", t);
}

void check_gradients(c10::ArrayRef<at::Tensor> grads) {
  const bool tangents = forward_mode();
  for (const auto& grad : grads) {
    if (!grad.defined()) continue;
    if (!usual(grad)) refuse("an incoming gradient", grad);
    if (tangents) check_tangent("an incoming gradient", grad);
  }
}

}  // namespace weft::fuser
