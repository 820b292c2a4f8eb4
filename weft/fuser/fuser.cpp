#include "weft/fuser/fuser.h"

#include <algorithm>

#include "weft/fuser/autograd.h"
#include "weft/fuser/call_validation.h"

namespace weft::fuser {

Tensors Fuser::operator()(const at::Tensor& x, ops::Params params, Tensors extras, uint64_t eval_mask,
                          c10::ArrayRef<ops::Buffers> buffers) {
  for (const auto& given : buffers) check_buffers(*pipeline_, given);
  const auto plan = find(make_plan_key(*pipeline_, x, params, extras, eval_mask));
  return run_plan(pipeline_, plan, x, params, std::move(extras), buffers);
}

std::shared_ptr<const Plan> Fuser::plan(const at::Tensor& x, ops::Params params, c10::ArrayRef<at::Tensor> extras,
                                        uint64_t eval_mask) {
  return find(make_plan_key(*pipeline_, x, params, extras, eval_mask));
}

std::shared_ptr<const Plan> Fuser::last_plan() const {
  const std::lock_guard lock(mutex_);
  return plans_.empty() ? nullptr : plans_.front();
}

int64_t Fuser::plans_kept() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(plans_.size());
}

std::shared_ptr<const Plan> Fuser::find(const fused::PlanKey& key) {
  {
    const std::lock_guard lock(mutex_);
    if (!plans_.empty() && plans_.front()->key == key) return plans_.front();
    const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const auto& plan) { return plan->key == key; });
    if (found != plans_.end()) {
      std::rotate(plans_.begin(), found, found + 1);
      return plans_.front();
    }
  }
  // The lock is not held here, because rules written in Python acquire the GIL. Of two equal plans the later is kept.
  const auto rules = fused::current_rules();
  auto made = make_plan(*pipeline_, key, *rules.list);
  ++plans_made_;
  const std::lock_guard lock(mutex_);
  std::erase_if(plans_,
                [&](const auto& plan) { return plan->key.rules_version() != rules.version || plan->key == key; });
  plans_.insert(plans_.begin(), made);
  if (plans_.size() > kMaxPlans) plans_.pop_back();
  return made;
}

}  // namespace weft::fuser
