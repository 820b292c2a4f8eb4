#include "weft/python/custom_op.h"

#include "weft/python/bridge.h"

namespace weft::python {
namespace {

std::vector<ComponentOp> component_ops(fused::StepContext& ctx, const std::vector<PyFused::ComponentInfo>& infos) {
  std::vector<ComponentOp> list;
  for (size_t i = 0; i < infos.size(); ++i) {
    const auto& info = infos[i];
    list.push_back(
        {ctx.op(static_cast<int>(i)), info.keeps_state, info.extra_outputs, info.slots, info.weight_slot, info.dtype});
  }
  return list;
}

}  // namespace

PyOp::PyOp(const py::object& module, std::vector<ops::ParamSpec> params, int extra_inputs, int extra_outputs)
    : module_(hold(py::weakref(module))),
      name_(py::type::of(module).attr("__name__").cast<std::string>()),
      params_(std::move(params)),
      extra_inputs_(extra_inputs),
      extra_outputs_(extra_outputs) {}

ops::Inferred PyOp::infer(const ops::OpPlan&, const ops::Spec&, c10::ArrayRef<ops::Spec>,
                          c10::ArrayRef<ops::Spec>) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, name_, ": cannot infer sizes before the call, because it is written in Python.");
}

at::Tensor PyOp::forward(ops::OpContext& ctx, const at::Tensor& x, ops::Params) const {
  const py::gil_scoped_acquire gil;
  const py::object module = (*module_)();
  return call_forward(module, py::list(py::make_tuple(module)),
                      {{.ctx = ctx, .keeps_state = true, .extra_outputs = extra_outputs_, .slots = 0}}, x);
}

at::Tensor PyOp::backward(ops::OpContext& ctx, const at::Tensor& dy, ops::Params) const {
  const py::gil_scoped_acquire gil;
  return call_backward(saved_op(ctx), {{.ctx = ctx, .keeps_state = true, .extra_outputs = extra_outputs_, .slots = 0}},
                       dy);
}

PyFused::PyFused(py::object op, std::vector<ComponentInfo> infos)
    : op_(hold(std::move(op))), infos_(std::move(infos)) {}

at::Tensor PyFused::forward(fused::StepContext& ctx, const at::Tensor& x) const {
  const py::gil_scoped_acquire gil;
  return call_forward(*op_, py::list(op_->attr("basic_ops")), component_ops(ctx, infos_), x);
}

ops::Gradient PyFused::backward(fused::StepContext& ctx, const ops::Gradient& dy) const {
  const py::gil_scoped_acquire gil;
  return call_backward(*op_, component_ops(ctx, infos_), dy.value);
}

}  // namespace weft::python
