#include "weft/python/custom_op.h"

#include "weft/python/bridge.h"

namespace weft::python {
namespace {

std::vector<Part> parts_of(fused::StepContext& ctx, const std::vector<PyFused::Shape>& shapes) {
  std::vector<Part> list;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& shape = shapes[i];
    list.push_back({ctx.op(static_cast<int>(i)), shape.keeps_state, shape.extra_outputs, shape.slots, shape.weight_slot,
                    shape.dtype});
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
  TORCH_CHECK_NOT_IMPLEMENTED(false, name_, " is written in Python and cannot tell its sizes before it ran.");
}

at::Tensor PyOp::forward(ops::OpContext& ctx, const at::Tensor& x, ops::Params) const {
  const py::gil_scoped_acquire gil;
  const py::object module = (*module_)();
  return call_forward(module, py::list(py::make_tuple(module)), {{ctx, true, extra_outputs_, 0}}, x);
}

at::Tensor PyOp::backward(ops::OpContext& ctx, const at::Tensor& dy, ops::Params) const {
  const py::gil_scoped_acquire gil;
  return call_backward(kept_op(ctx), {{ctx, true, extra_outputs_, 0}}, dy);
}

PyFused::PyFused(py::object op, std::vector<Shape> shapes) : op_(hold(std::move(op))), shapes_(std::move(shapes)) {}

at::Tensor PyFused::forward(fused::StepContext& ctx, const at::Tensor& x) const {
  const py::gil_scoped_acquire gil;
  return call_forward(*op_, py::list(op_->attr("basic_ops")), parts_of(ctx, shapes_), x);
}

at::Tensor PyFused::backward(fused::StepContext& ctx, const at::Tensor& dy) const {
  const py::gil_scoped_acquire gil;
  return call_backward(*op_, parts_of(ctx, shapes_), dy);
}

}  // namespace weft::python
