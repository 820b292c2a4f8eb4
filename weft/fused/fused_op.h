#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "weft/ops/operation.h"

namespace weft::fused {

/// A fused operation's view of a call: one context and the parameters of each of its parts, and its own saved slots.
class StepContext {
 public:
  StepContext(const ops::OpPlan* plans, ops::Frame& frame, int first, int own_base)
      : plans_(plans), frame_(frame), first_(first), own_base_(own_base) {}

  ops::OpContext op(int index) { return {plans_[first_ + index], frame_, first_ + index}; }
  ops::Params params(int index) const {
    const auto& plan = plans_[first_ + index];
    return {frame_.params + plan.param_base, plan.needs_param_grad.size()};
  }
  void save(int slot, at::Tensor t) { frame_.saved[own_base_ + slot] = std::move(t); }
  const at::Tensor& saved(int slot) const { return frame_.saved[own_base_ + slot]; }
  int first() const { return first_; }

 private:
  const ops::OpPlan* plans_;
  ops::Frame& frame_;
  int first_, own_base_;
};

/// Stands for a run of basic operations. A forward-only or backward-only one is interchangeable with its parts in that
/// pass: forward fills each part's slots as the part itself would. A joint one serves both passes and may save other
/// things, in slots of its own.
class FusedOp {
 public:
  virtual ~FusedOp() = default;
  virtual at::Tensor forward(StepContext& ctx, const at::Tensor& x) const;
  virtual at::Tensor backward(StepContext& ctx, const at::Tensor& dy) const;
  /// Joint only: names of its own slots, the first of which is filled whenever its forward recorded.
  virtual std::vector<std::string> saved_names() const { return {}; }
  /// Joint only: false for a slot of a part that it leaves empty although the part itself would fill it. `plans` are
  /// those of its parts.
  virtual bool fills(const ops::OpPlan* /*plans*/, int /*index*/, int /*slot*/) const { return true; }
  /// Joint only: true if its backward reads a parameter that the part's own backward does not.
  virtual bool reads(int /*index*/, int /*param*/) const { return false; }
  /// Which kernels compute it, given those of its parts: the best of them, unless it says otherwise.
  virtual kernels::TierChoice kernel(c10::ArrayRef<kernels::TierChoice> components) const;
  /// What it decided in the last call that only then could be decided; for `explain()`.
  virtual std::string note() const { return {}; }
  /// True if it routes channels between its own parts itself.
  virtual bool routes_inner_channels() const { return false; }
  /// True for one written in Python: it may keep free attributes for backward.
  virtual bool process_local() const { return false; }
};

using FusedPtr = std::shared_ptr<const FusedOp>;

}  // namespace weft::fused
