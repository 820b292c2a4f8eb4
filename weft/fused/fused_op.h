#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "weft/ops/leading_dims.h"
#include "weft/ops/operation.h"

namespace weft::fused {

/// A fused operation's view of a call: the context and parameters of each basic operation it replaces, by index, and
/// the slots that it saves itself.
class StepContext {
 public:
  /// `packed_dx_min_rows`: from how many rows on the next backward step uses the packed transpose of dx; 0: never.
  StepContext(const ops::OpPlan* plans, ops::Frame& frame, const uint8_t* saves, int first, int own_base,
              int64_t packed_dx_min_rows = 0)
      : plans_(plans),
        frame_(frame),
        saves_(saves),
        first_(first),
        own_base_(own_base),
        packed_dx_min_rows_(packed_dx_min_rows) {}

  ops::OpContext op(int index) { return {plans_[first_ + index], frame_, first_ + index, saves_}; }
  ops::Params params(int index) const {
    const auto& plan = plans_[first_ + index];
    return {frame_.params + plan.param_base, plan.needs_param_grad.size()};
  }
  void save(int slot, at::Tensor t) { frame_.saved[own_base_ + slot] = std::move(t); }
  const at::Tensor& saved(int slot) const { return frame_.saved[own_base_ + slot]; }
  int first() const { return first_; }
  /// Backward: whether the next step uses the packed transpose of a dx with the rows of `dy`.
  bool needs_packed_dx(const at::Tensor& dy) const {
    return packed_dx_min_rows_ > 0 && ops::has_rows(dy, packed_dx_min_rows_);
  }

 private:
  const ops::OpPlan* plans_;
  ops::Frame& frame_;
  const uint8_t* saves_;
  int first_, own_base_;
  int64_t packed_dx_min_rows_;
};

/// Replaces a run of basic operations. A forward-only or backward-only fused operation is interchangeable with them in
/// that pass: forward saves exactly what they would save. A joint one implements both passes and may save less,
/// or into additional slots.
class FusedOp {
 public:
  virtual ~FusedOp() = default;
  virtual at::Tensor forward(StepContext& ctx, const at::Tensor& x) const;
  virtual ops::Gradient backward(StepContext& ctx, const ops::Gradient& grad) const;
  /// Joint only: names of its additional slots. Forward must fill the first one whenever it saves for backward.
  virtual std::vector<std::string> saved_names() const { return {}; }
  /// Joint only: false for a slot of operation `index` that its backward does not read, because it recomputes the
  /// tensor. Forward then does not save it. `plans` belong to the operations it replaces.
  virtual bool reads_saved(const ops::OpPlan* /*plans*/, int /*index*/, int /*slot*/) const { return true; }
  /// Joint only: true if its backward reads a parameter that the operation's own backward does not read.
  virtual bool reads_param(int /*index*/, int /*param*/) const { return false; }
  /// The kernel tier, given those of the operations it replaces. Default: the best of them.
  virtual kernels::TierChoice kernel(c10::ArrayRef<kernels::TierChoice> components) const;
  /// The run-time decision of the last call, for `explain()`.
  virtual std::string note() const { return {}; }
  /// True if it routes the channels between the operations it replaces itself.
  virtual bool routes_inner_channels() const { return false; }
  /// True for a fused operation written in Python: it may keep arbitrary state for backward.
  virtual bool process_local() const { return false; }
};

using FusedPtr = std::shared_ptr<const FusedOp>;

}  // namespace weft::fused
