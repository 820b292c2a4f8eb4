#pragma once
#include <memory>
#include <string>
#include <vector>

#include "weft/fused/rules.h"
#include "weft/fuser/pipeline.h"

namespace weft::fuser {

/// A rule whose pattern was found and that declined.
struct Rejection {
  std::string rule;
  fused::Pass pass;
  int first, count;
  std::string reason;
};

/// A tensor handed from an extra output to an extra input before a step runs; `last` if nobody needs it afterwards.
struct Route {
  int from, to;
  bool last;
};

struct PlannedStep {
  fused::Step step;
  std::vector<Route> routes;    // forward: into this step. backward: gradients out of it, `from` and `to` as in forward
  std::vector<int> grad_slots;  // extra-output slots whose gradients reach it
  std::vector<int> needed_slots;  // extra outputs that a fused step must deliver, since somebody outside reads them
  bool needs_grad = false;        // any gradient of any part
};

/// How a pipeline runs for one key: forward and backward cut independently. Holds no tensor; immutable, so any number
/// of threads may run it.
struct Plan {
  fused::PlanKey key;
  std::vector<ops::OpPlan> ops;
  std::vector<PlannedStep> forward, backward;    // both in forward order
  std::vector<int> backward_params;              // parameters whose values backward reads, as flat indices
  std::vector<uint8_t> extra_out_requires_grad;  // does a gradient flow through this extra output
  bool output_requires_grad = false;             // … through the main output
  int num_saved = 0;                             // slots of operations and joint steps
  bool in_place = false;                         // some operation may overwrite an extra input
  bool process_local = false;                    // some operation, basic or fused, is written in Python
  std::vector<Rejection> rejections;
};

std::shared_ptr<const Plan> make_plan(const Pipeline& pipeline, const fused::PlanKey& key,
                                      const fused::RuleList& rules);

/// A key seen from the pipeline, following the dtypes through it by each operation's rule.
fused::PlanView make_plan_view(const Pipeline& pipeline, const fused::PlanKey& key,
                               const std::vector<ops::OpPlan>& plans);

/// The backward plan when some gradients will not be used; `unused` flags x, extra inputs and parameters as the key
/// orders them.
Plan prune(const Pipeline& pipeline, const Plan& plan, const std::vector<uint8_t>& unused);

}  // namespace weft::fuser
