#pragma once
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "weft/fused/fused_op.h"
#include "weft/ops/operation.h"

namespace weft::python {

/// A basic operation written in Python: a subclass of torchweft.ops.BasicOperation with fuser_forward and
/// fuser_backward.
class __attribute__((visibility("hidden"))) PyOp final : public ops::BasicOp {
 public:
  PyOp(const py::object& module, std::vector<ops::ParamSpec> params, int extra_inputs, int extra_outputs);

  std::string_view name() const override { return name_; }
  std::vector<FieldValue> fields() const override { return {}; }
  std::vector<ops::ParamSpec> params() const override { return params_; }
  int extra_inputs() const override { return extra_inputs_; }
  int extra_outputs() const override { return extra_outputs_; }
  ops::DtypeRule dtype_rule() const override { return ops::DtypeRule::unknown; }
  bool process_local() const override { return true; }
  ops::Inferred infer(const ops::OpPlan&, const ops::Spec&, c10::ArrayRef<ops::Spec>,
                      c10::ArrayRef<ops::Spec>) const override;
  at::Tensor forward(ops::OpContext& ctx, const at::Tensor& x, ops::Params params) const override;
  at::Tensor backward(ops::OpContext& ctx, const at::Tensor& dy, ops::Params params) const override;

 private:
  std::shared_ptr<py::weakref> module_;  // weak: the module owns the pipeline that owns this operation
  std::string name_;
  std::vector<ops::ParamSpec> params_;
  int extra_inputs_, extra_outputs_;
};

/// A fused operation written in Python, in one pass or both: a subclass of torchweft.ops.FusedOperation.
class __attribute__((visibility("hidden"))) PyFused final : public fused::JointFusion {
 public:
  /// Properties of a basic operation that it replaces.
  struct ComponentInfo {
    bool keeps_state;        // keeps its Python context for backward; otherwise fills the slots of a C++ operation
    int extra_outputs;       // number of extra outputs
    int slots, weight_slot;  // number of saved slots, and which one holds the weight (BasicOp::weight_slot)
    at::ScalarType dtype;    // compute dtype; Undefined if unknown
  };
  PyFused(py::object op, std::vector<ComponentInfo> infos);

  at::Tensor forward(fused::StepContext& ctx, const at::Tensor& x) const override;
  ops::Gradient backward(fused::StepContext& ctx, const ops::Gradient& dy) const override;
  bool routes_inner_channels() const override { return true; }
  bool process_local() const override { return true; }

 private:
  std::shared_ptr<py::object> op_;
  std::vector<ComponentInfo> infos_;
};

}  // namespace weft::python
