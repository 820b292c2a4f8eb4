#pragma once
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "weft/fused/rule.h"
#include "weft/ops/operation.h"

namespace weft::python {

/// What rules and operations written in Python may ask about the call under way on this thread: the Python objects of
/// the pipeline's operations, and the keyword arguments of each (nullptr: none).
struct Scope {
  const std::vector<py::object>* ops = nullptr;
  PyObject* keywords = nullptr;  // list of dicts
};
Scope& scope();

/// Sets the scope for one call.
class ScopeGuard {
 public:
  explicit ScopeGuard(Scope next) : before_(scope()) { scope() = next; }
  ~ScopeGuard() { scope() = before_; }
  ScopeGuard(const ScopeGuard&) = delete;
  ScopeGuard& operator=(const ScopeGuard&) = delete;

 private:
  Scope before_;
};

/// A basic operation written in Python: a subclass of weft.ops.BasicOperation with fuser_forward and fuser_backward.
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
  std::shared_ptr<py::weakref> module_;  // weak: the module owns the pipeline that holds this
  std::string name_;
  std::vector<ops::ParamSpec> params_;
  int extra_inputs_, extra_outputs_;
};

}  // namespace weft::python
