#pragma once
#include <memory>
#include <string>
#include <vector>

#include "weft/fused/rules.h"
#include "weft/fuser/pipeline.h"

namespace weft::fuser {

/// A rule whose pattern matched but that was rejected.
struct Rejection {
  std::string rule;
  fused::Pass pass;
  int first, count;  // the matched operations
  std::string reason;
};

/// Passes a channel's tensor from an extra-output slot to an extra-input slot before a step runs. With `last` no later
/// reader exists and the tensor is moved.
struct Route {
  int from, to;  // slots
  bool last;
};

/// A step and what the executor does around it.
struct PlannedStep {
  fused::Step step;
  /// Channels that this step reads. Backward adds the gradient in slot `to` to that in slot `from` after the step.
  std::vector<Route> routes = {};
  std::vector<int> grad_slots = {};    // extra-output slots whose gradients this step reads
  std::vector<int> needed_slots = {};  // extra outputs that a fused step must set, because they are read outside it
  bool needs_grad = false;             // any operation of the step needs a gradient
  int64_t packed_dx_min_rows = 0;      // backward: BasicOp::packed_dy_min_rows of the operation before the step
};

/// How a pipeline runs for one key. Forward and backward are divided into steps independently. Immutable and without
/// tensors, so any number of threads may run it.
struct Plan {
  fused::PlanKey key;
  std::vector<ops::OpPlan> ops;
  std::vector<PlannedStep> forward, backward;    // both in forward order
  std::vector<int> backward_params;              // flat indices of the parameters whose values backward reads
  std::vector<uint8_t> extra_out_requires_grad;  // per extra-output slot
  bool output_requires_grad = false;             // of the main output
  int num_saved = 0;                             // slots of operations and additional slots of joint steps
  std::vector<uint8_t> saves;                    // per slot: whether a fused forward saves it, since backward reads it
  bool in_place = false;                         // an operation may overwrite an extra input
  bool process_local = false;                    // a basic operation or a fused forward is written in Python
  std::vector<Rejection> rejections;
};

std::shared_ptr<const Plan> make_plan(const Pipeline& pipeline, const fused::PlanKey& key,
                                      const fused::RuleList& rules);

/// Propagates the dtypes of a key through the pipeline by each operation's DtypeRule. Raises TypeError as
/// `check_dtype`.
fused::PlanView make_plan_view(const Pipeline& pipeline, const fused::PlanKey& key,
                               const std::vector<ops::OpPlan>& plans);

/// Raises TypeError for an integer, bool or float8 tensor if operation i computes in floating point. `what` names
/// the tensor in the error.
void check_dtype(const Pipeline& pipeline, int i, const std::string& what, at::ScalarType dtype);

/// The plan without the gradients that are not used; `unused` flags x, extra inputs and parameters in key order.
Plan prune(const Pipeline& pipeline, const Plan& plan, const std::vector<uint8_t>& unused);

}  // namespace weft::fuser
