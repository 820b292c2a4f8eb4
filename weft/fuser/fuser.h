#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "weft/fuser/plan.h"

namespace weft::fuser {

using Tensors = c10::SmallVector<at::Tensor, 4>;

/// A pipeline with its cached plans. Thread-safe.
class Fuser {
 public:
  explicit Fuser(Pipeline pipeline) : pipeline_(std::make_shared<const Pipeline>(std::move(pipeline))) {}

  /// Returns the main output, then the extra outputs for the caller. `params` are in the order of `Pipeline::params()`.
  /// `extras` are consumed, so that an in-place operation may overwrite one that is not referenced elsewhere. Bit
  /// `Pipeline::eval_bit(i)` of `eval_mask` puts operation i into evaluation mode. `buffers` are for operations with
  /// takes_buffers().
  Tensors operator()(const at::Tensor& x, ops::Params params, Tensors extras, uint64_t eval_mask = 0,
                     c10::ArrayRef<ops::Buffers> buffers = {});

  /// The plan for such a call, created if it is not cached.
  std::shared_ptr<const Plan> plan(const at::Tensor& x, ops::Params params, c10::ArrayRef<at::Tensor> extras,
                                   uint64_t eval_mask = 0);

  /// The plan of the last call; null before the first one.
  std::shared_ptr<const Plan> last_plan() const;

  const Pipeline& pipeline() const { return *pipeline_; }
  std::shared_ptr<const Pipeline> shared_pipeline() const { return pipeline_; }
  /// The number of plans created since construction, and of plans cached now.
  int64_t plans_made() const { return plans_made_; }
  int64_t plans_kept() const;

 private:
  static constexpr size_t kMaxPlans = 16;

  std::shared_ptr<const Plan> find(const fused::PlanKey& key);

  std::shared_ptr<const Pipeline> pipeline_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Plan>> plans_;  // most recently used first
  std::atomic<int64_t> plans_made_{0};
};

}  // namespace weft::fuser
