#pragma once
#include <concepts>
#include <string>
#include <vector>

#include "weft/ops/leading_dims.h"
#include "weft/ops/operation.h"

namespace weft::fused {

class StepContext;

/// Replaces a run of basic operations in one pass (ForwardFusion, BackwardFusion) or in both (JointFusion). Immutable.
class FusedOp {
 public:
  virtual ~FusedOp() = default;
  /// True if it routes the channels between the operations it replaces itself.
  virtual bool routes_inner_channels() const { return false; }
  /// True for a fused operation written in Python: it may keep arbitrary state for backward.
  virtual bool process_local() const { return false; }
};

/// Saves exactly what the basic operations would save, so that any backward can follow.
class ForwardFusion : public virtual FusedOp {
 public:
  virtual at::Tensor forward(StepContext& ctx, const at::Tensor& x) const = 0;
};

/// Reads only what the basic operations save.
class BackwardFusion : public virtual FusedOp {
 public:
  virtual ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const = 0;
};

/// Its backward follows its own forward, so it may save less than the basic operations, or into additional slots.
class JointFusion : public ForwardFusion, public BackwardFusion {
 public:
  /// Names of its additional slots. Forward must fill the first one whenever it saves for backward.
  virtual std::vector<std::string> saved_names() const { return {}; }
  /// False for a slot of operation `index` that backward does not read, because it recomputes the tensor. Forward then
  /// does not save it. `plans` belong to the operations it replaces.
  virtual bool reads_saved(const ops::OpPlan* /*plans*/, int /*index*/, int /*slot*/) const { return true; }
  /// True if backward reads a parameter that the operation's own backward does not read.
  virtual bool reads_param(int /*index*/, int /*param*/) const { return false; }
};

/// A fused operation and the interfaces that it implements; the others are null.
struct FusedPtr {
  std::shared_ptr<const FusedOp> op = {};
  const ForwardFusion* forward = nullptr;
  const BackwardFusion* backward = nullptr;
  const JointFusion* joint = nullptr;

  FusedPtr() = default;
  template <std::derived_from<FusedOp> T>
  FusedPtr(const std::shared_ptr<T>& fused) : op(fused) {
    if constexpr (std::derived_from<T, ForwardFusion>) forward = fused.get();
    if constexpr (std::derived_from<T, BackwardFusion>) backward = fused.get();
    if constexpr (std::derived_from<T, JointFusion>) joint = fused.get();
  }
  explicit operator bool() const { return op != nullptr; }
  const FusedOp* operator->() const { return op.get(); }
};

/// A step of a plan: one basic operation (`fused` is null), or a fused operation for a run of them. With fewer rows
/// than `min_rows` the basic operations run instead.
struct Step {
  FusedPtr fused = {};
  int first = 0, count = 1;
  int64_t min_rows = 0;
  std::string rule = {};  // name of the rule that created it
  int own_base = -1;      // first additional saved slot of a joint operation; -1: it has none
};

/// A fused operation's view of a call: the context and parameters of each basic operation it replaces, by index, and
/// the slots that it saves itself.
class StepContext {
 public:
  /// `packed_dx_min_rows`: from how many rows on the next backward step uses the packed transpose of dx; 0: never.
  StepContext(const ops::OpPlan* plans, ops::Frame& frame, const uint8_t* saves, const Step& step,
              int64_t packed_dx_min_rows = 0)
      : plans_(plans), frame_(frame), saves_(saves), step_(step), packed_dx_min_rows_(packed_dx_min_rows) {}

  ops::OpContext op(int index) { return {plans_[step_.first + index], frame_, step_.first + index, saves_}; }
  ops::Params params(int index) const {
    const auto& plan = plans_[step_.first + index];
    return {frame_.params + plan.param_base, plan.needs_param_grad.size()};
  }
  void save(int slot, at::Tensor t) { frame_.saved[step_.own_base + slot] = std::move(t); }
  const at::Tensor& saved(int slot) const { return frame_.saved[step_.own_base + slot]; }
  /// Backward: whether the next step uses the packed transpose of a dx with the rows of a dy.
  bool needs_packed_dx(at::IntArrayRef dy_sizes) const {
    return packed_dx_min_rows_ > 0 && ops::has_rows(dy_sizes, packed_dx_min_rows_);
  }
  /// Reports the run-time decision of this call, for `explain()`.
  void report(std::string text) {
    if (frame_.report) frame_.report->set(step_.first, step_.rule, std::move(text));
  }

 private:
  const ops::OpPlan* plans_;
  ops::Frame& frame_;
  const uint8_t* saves_;
  const Step& step_;
  int64_t packed_dx_min_rows_;
};

}  // namespace weft::fused
