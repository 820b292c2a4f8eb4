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
  int first, count;
  std::string reason;
};

/// Moves an extra output to an extra input before a step runs; `last` if no later step reads it.
struct Route {
  int from, to;
  bool last;
};

struct PlannedStep {
  fused::Step step;
  /// Forward: into this step. Backward: gradients out of it, `from` and `to` as in forward.
  std::vector<Route> routes = {};
  std::vector<int> grad_slots = {};    // extra-output slots whose gradients this step reads
  std::vector<int> needed_slots = {};  // extra outputs that a fused step must set, because they are read outside it
  bool needs_grad = false;             // any operation of the step needs a gradient
  int64_t packed_dx_min_rows = 0;      // backward: packed_dy_min_rows of the operation before the step
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
  bool process_local = false;                    // a basic or fused operation is written in Python
  std::vector<Rejection> rejections;
};

std::shared_ptr<const Plan> make_plan(const Pipeline& pipeline, const fused::PlanKey& key,
                                      const fused::RuleList& rules);

/// Applies a key to the pipeline, propagating dtypes by each operation's DtypeRule.
fused::PlanView make_plan_view(const Pipeline& pipeline, const fused::PlanKey& key,
                               const std::vector<ops::OpPlan>& plans);

/// Raises TypeError for an integer, bool or float8 tensor if operation i computes in floating point. `what` names it.
void check_dtype(const Pipeline& pipeline, int i, const std::string& what, at::ScalarType dtype);

/// The plan without the gradients that are not used; `unused` flags x, extra inputs and parameters in key order.
Plan prune(const Pipeline& pipeline, const Plan& plan, const std::vector<uint8_t>& unused);

}  // namespace weft::fuser
