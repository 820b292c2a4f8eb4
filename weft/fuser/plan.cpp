#include "weft/fuser/plan.h"

#include <ATen/OpMathType.h>

#include <algorithm>
#include <ranges>

#include "weft/fuser/matcher.h"

namespace weft::fuser {
namespace {

using fused::Pass;
using fused::PlanKey;
using fused::Step;

/// The gradients that each operation must compute: those of its inputs that depend on a tensor with requires_grad.
std::vector<ops::OpPlan> propagate_requires_grad(const Pipeline& pipeline, const PlanKey& key) {
  const int extras = static_cast<int>(pipeline.caller_inputs().size());
  std::vector<uint8_t> extra_in_requires_grad(pipeline.num_extra_in()),
      extra_out_requires_grad(pipeline.num_extra_out());
  for (int k = 0; k < extras; ++k)
    extra_in_requires_grad[pipeline.caller_inputs()[k]] = key.tensor_meta(1 + k).requires_grad;

  std::vector<ops::OpPlan> plans(pipeline.size());
  bool x_requires_grad = key.tensor_meta(0).requires_grad;
  for (int i = 0; i < pipeline.size(); ++i) {
    auto& plan = plans[i];
    plan.needs_input_grad = x_requires_grad;
    for (int p = pipeline.param_base(i); p < pipeline.param_base(i + 1); ++p)
      plan.needs_param_grad.push_back(key.tensor_meta(1 + extras + p).requires_grad);
    for (int s = pipeline.extra_in_base(i); s < pipeline.extra_in_base(i + 1); ++s)
      plan.needs_extra_grad.push_back(pipeline.source(s) < 0 ? extra_in_requires_grad[s]
                                                             : extra_out_requires_grad[pipeline.source(s)]);
    const auto any = [](const std::vector<uint8_t>& flags) {
      return std::find(flags.begin(), flags.end(), 1) != flags.end();
    };
    x_requires_grad = plan.needs_grad =
        plan.needs_input_grad || any(plan.needs_param_grad) || any(plan.needs_extra_grad);
    std::fill(extra_out_requires_grad.begin() + pipeline.extra_out_base(i),
              extra_out_requires_grad.begin() + pipeline.extra_out_base(i + 1), plan.needs_grad);

    plan.autocast = key.autocast();
    plan.recipe = pipeline.op(i).quantizes() ? quant::find_recipe(key.recipe()) : nullptr;
    plan.training = pipeline.eval_bit(i) < 0 || (key.eval_mask() >> pipeline.eval_bit(i) & 1) == 0;
    plan.param_base = pipeline.param_base(i);
    plan.saved_base = pipeline.saved_base(i);
    plan.extra_in_base = pipeline.extra_in_base(i);
    plan.extra_out_base = pipeline.extra_out_base(i);
  }
  return plans;
}

/// The dtype of the operand that operation i combines with x: its first parameter, else its extra input; Undefined if a
/// channel feeds that input.
at::ScalarType other_operand_dtype(const Pipeline& pipeline, const PlanKey& key, int i) {
  const auto& inputs = pipeline.caller_inputs();
  const int extras = static_cast<int>(inputs.size());
  if (pipeline.param_base(i) < pipeline.param_base(i + 1))
    return key.tensor_meta(1 + extras + pipeline.param_base(i)).dtype;
  const auto found = std::find(inputs.begin(), inputs.end(), pipeline.extra_in_base(i));
  return found == inputs.end() ? at::ScalarType::Undefined
                               : key.tensor_meta(1 + static_cast<int>(found - inputs.begin())).dtype;
}

/// The compute dtype of an operation, given the dtype of x; Undefined if it is not known before the operation runs.
at::ScalarType compute_dtype(const Pipeline& pipeline, const PlanKey& key, const ops::OpPlan& plan, int i,
                             at::ScalarType x) {
  switch (pipeline.op(i).dtype_rule()) {
    case ops::DtypeRule::autocast:
      return plan.dtype(x);
    case ops::DtypeRule::weight:
      return plan.dtype(other_operand_dtype(pipeline, key, i));
    case ops::DtypeRule::promote: {
      const bool autocast = plan.autocast != at::ScalarType::Undefined;
      if (autocast && !plan.needs_param_grad.empty()) return x;  // the parameter (of Bias) is cast to it
      const auto other = other_operand_dtype(pipeline, key, i);
      const bool known = x != at::ScalarType::Undefined && other != at::ScalarType::Undefined;
      return known ? c10::promoteTypes(x, other) : at::ScalarType::Undefined;
    }
    case ops::DtypeRule::input:
    case ops::DtypeRule::opmath_output:
    case ops::DtypeRule::any:
      return x;
    case ops::DtypeRule::unknown:
      break;
  }
  return at::ScalarType::Undefined;
}

/// Raises for a float64 input of an operation whose weight has another dtype: torch raises as well, and the caller
/// asked for more than the result would have. Other inputs are converted to the dtype of the weight, as Transformer
/// Engine does, and under autocast all of them.
void check_precision(const Pipeline& pipeline, const ops::OpPlan& plan, int i, at::ScalarType input,
                     at::ScalarType compute) {
  if (pipeline.op(i).dtype_rule() != ops::DtypeRule::weight || plan.autocast != at::ScalarType::Undefined) return;
  TORCH_CHECK_TYPE(input != at::kDouble || compute == at::kDouble, pipeline.label(i), ": input is float64, the weight ",
                   dtype_name(compute), "; expected a weight of float64. Convert the module with .double(), or the ",
                   "input with .to(torch.", dtype_name(compute), ").");
}

void check_extra_dtypes(const Pipeline& pipeline, const PlanKey& key) {
  for (size_t k = 0; k < pipeline.caller_inputs().size(); ++k) {
    const int slot = pipeline.caller_inputs()[k], i = pipeline.consumer(slot), extra = slot - pipeline.extra_in_base(i);
    if (!pipeline.op(i).is_index(extra))
      check_dtype(pipeline, i, "extra input " + std::to_string(extra), key.tensor_meta(1 + static_cast<int>(k)).dtype);
  }
}

/// The index of the step that covers an operation.
int step_of(const std::vector<Step>& steps, int op) {
  for (int s = 0; s < static_cast<int>(steps.size()); ++s)
    if (op < steps[s].first + steps[s].count) return s;
  return -1;
}

/// The steps of a pass with those of `joint` that are fused, in place of what they cover.
std::vector<Step> with_joint_steps(const std::vector<Step>& pass, const std::vector<Step>& joint) {
  std::vector<Step> out;
  for (const auto& step : pass) {
    const auto& cover = joint[step_of(joint, step.first)];
    if (!cover.fused) out.push_back(step);
    if (cover.fused && cover.first == step.first) out.push_back(cover);
  }
  return out;
}

/// Adds to each step the routes of extra tensors. A fused step handles channels between its own operations itself.
std::vector<PlannedStep> route(const Pipeline& pipeline, const std::vector<Step>& steps) {
  std::vector<PlannedStep> planned;
  for (const auto& step : steps) {
    PlannedStep p{.step = step};
    const int end = step.first + step.count;
    for (int slot = pipeline.extra_out_base(step.first); slot < pipeline.extra_out_base(end); ++slot)
      p.grad_slots.push_back(slot);
    for (int slot = pipeline.extra_in_base(step.first); slot < pipeline.extra_in_base(end); ++slot) {
      const int from = pipeline.source(slot);
      const bool inner = from >= 0 && step.fused && pipeline.producer(from) >= step.first;
      if (from >= 0 && !inner) p.routes.push_back({from, slot, false});
    }
    planned.push_back(std::move(p));
  }
  for (int slot = 0; slot < pipeline.num_extra_in(); ++slot) {
    const int from = pipeline.source(slot);
    if (from < 0) continue;
    auto& step = planned[step_of(steps, pipeline.producer(from))];
    const bool outside = step_of(steps, pipeline.consumer(slot)) != step_of(steps, pipeline.producer(from));
    if (step.step.fused && outside) step.needed_slots.push_back(from);
  }
  for (int from = 0; from < pipeline.num_extra_out(); ++from) {
    auto& producer = planned[step_of(steps, pipeline.producer(from))];
    if (producer.step.fused && pipeline.output(from).to_caller) producer.needed_slots.push_back(from);
    if (pipeline.output(from).to_caller) continue;
    for (auto& step : std::views::reverse(planned)) {
      const auto found =
          std::find_if(step.routes.rbegin(), step.routes.rend(), [&](const Route& r) { return r.from == from; });
      if (found == step.routes.rend()) continue;
      found->last = true;
      break;
    }
  }
  return planned;
}

/// Raises unless the steps, which rules written in Python may have rewritten, cover every operation once and implement
/// the pass.
void check_coverage(const Pipeline& pipeline, const std::vector<Step>& steps, Pass which) {
  const auto* pass = fused::pass_name(which);
  int next = 0;
  for (const auto& step : steps) {
    TORCH_CHECK(step.first == next && step.count > 0, "The ", pass,
                " plan does not cover every operation once and in order: step '", step.rule, "' starts at operation ",
                step.first, ", expected ", next, ".");
    TORCH_CHECK(
        !step.fused || (which == Pass::forward ? step.fused.forward != nullptr : step.fused.backward != nullptr),
        "The ", pass, " plan has step '", step.rule, "', which does not implement this pass.");
    next += step.count;
  }
  TORCH_CHECK(next == pipeline.size(), "The ", pass, " plan covers ", next, " of ", pipeline.size(), " operations.");
}

/// Sets `needs_grad` and `packed_dx_min_rows` of backward steps.
void mark_gradients(const Pipeline& pipeline, const std::vector<ops::OpPlan>& plans, std::vector<PlannedStep>& steps) {
  for (auto& planned : steps) {
    const int first = planned.step.first;
    planned.needs_grad = false;
    for (int i = 0; i < planned.step.count; ++i) planned.needs_grad |= plans[first + i].needs_grad;
    planned.packed_dx_min_rows = first > 0 ? pipeline.op(first - 1).packed_dy_min_rows(plans[first - 1]) : 0;
  }
}

/// The slots that forward saves: all but those that the backward of a joint step does not read.
std::vector<uint8_t> slots_for_backward(const Pipeline& pipeline, const Plan& plan) {
  std::vector<uint8_t> saves(plan.num_saved, 1);
  for (const auto& planned : plan.backward) {
    const auto& step = planned.step;
    for (int i = 0; step.fused.joint && i < step.count; ++i) {
      const int base = pipeline.saved_base(step.first + i), end = pipeline.saved_base(step.first + i + 1);
      for (int slot = base; slot < end; ++slot)
        saves[slot] = step.fused.joint->reads_saved(plan.ops.data() + step.first, i, slot - base);
    }
  }
  return saves;
}

/// Parameters whose values backward reads: by its operations, and in addition by joint steps.
std::vector<int> params_for_backward(const Pipeline& pipeline, const Plan& plan) {
  std::vector<int> list;
  for (const auto& planned : plan.backward) {
    const auto& step = planned.step;
    for (int i = step.first; i < step.first + step.count; ++i) {
      for (int p = pipeline.param_base(i); p < pipeline.param_base(i + 1); ++p) {
        const auto read = pipeline.params()[p].backward_read;
        const bool needs_value =
            read == ops::BackwardRead::always ? plan.ops[i].needs_grad : plan.ops[i].needs_input_grad;
        const bool joint = planned.needs_grad && step.fused.joint &&
                           step.fused.joint->reads_param(i - step.first, p - pipeline.param_base(i));
        if (joint || (read != ops::BackwardRead::never && needs_value)) list.push_back(p);
      }
    }
  }
  return list;
}

}  // namespace

void check_dtype(const Pipeline& pipeline, int i, const std::string& what, at::ScalarType dtype) {
  const auto rule = pipeline.op(i).dtype_rule();
  const bool any = rule == ops::DtypeRule::any || rule == ops::DtypeRule::unknown;
  TORCH_CHECK_TYPE(any || dtype == at::ScalarType::Undefined || is_compute_dtype(dtype), pipeline.label(i), ": ", what,
                   " is ", dtype_name(dtype), ", expected ", kComputeDtypes, ". Convert it first, e.g. with .float().");
}

fused::PlanView make_plan_view(const Pipeline& pipeline, const PlanKey& key, const std::vector<ops::OpPlan>& plans) {
  fused::PlanView view{.key = key, .plans = plans, .input_dtypes = {}, .compute_dtypes = {}};
  auto dtype = key.tensor_meta(0).dtype;
  check_extra_dtypes(pipeline, key);
  for (int i = 0; i < pipeline.size(); ++i) {
    check_dtype(pipeline, i, "input", dtype);
    view.input_dtypes.push_back(dtype);
    dtype = compute_dtype(pipeline, key, plans[i], i, dtype);
    check_precision(pipeline, plans[i], i, view.input_dtypes.back(), dtype);
    view.compute_dtypes.push_back(dtype);
    if (pipeline.op(i).dtype_rule() == ops::DtypeRule::opmath_output && dtype != at::ScalarType::Undefined)
      dtype = at::toOpMathType(dtype);
  }
  return view;
}

Plan prune(const Pipeline& pipeline, const Plan& plan, const std::vector<uint8_t>& unused) {
  auto key = plan.key;
  for (size_t i = 0; i < unused.size(); ++i)
    if (unused[i]) key.drop_grad(static_cast<int>(i));
  Plan pruned = plan;
  pruned.ops = propagate_requires_grad(pipeline, key);
  mark_gradients(pipeline, pruned.ops, pruned.backward);
  return pruned;
}

std::shared_ptr<const Plan> make_plan(const Pipeline& pipeline, const PlanKey& key, const fused::RuleList& rules) {
  auto plan = std::make_shared<Plan>();
  plan->key = key;
  plan->ops = propagate_requires_grad(pipeline, key);
  const auto plan_view = make_plan_view(pipeline, key, plan->ops);

  std::vector<Step> steps(pipeline.size());  // one per operation, then with joint fusions
  for (int i = 0; i < pipeline.size(); ++i) steps[i].first = i;
  Matcher matcher(pipeline, plan_view, rules, plan->rejections);
  steps = matcher.apply(Pass::joint, RuleOwner::user, std::move(steps));
  auto forward = matcher.apply(Pass::forward, RuleOwner::user, steps);
  auto backward = matcher.apply(Pass::backward, RuleOwner::user, steps);
  matcher.reserve(forward);
  matcher.reserve(backward);
  steps = matcher.apply(Pass::joint, RuleOwner::library, std::move(steps));
  plan->num_saved = pipeline.num_saved();
  for (auto& step : steps) {
    const auto own = step.fused.joint ? static_cast<int>(step.fused.joint->saved_names().size()) : 0;
    if (own > 0) step.own_base = plan->num_saved;
    plan->num_saved += own;
  }
  forward = matcher.apply(Pass::forward, RuleOwner::library, with_joint_steps(forward, steps));
  backward = matcher.apply(Pass::backward, RuleOwner::library, with_joint_steps(backward, steps));
  check_coverage(pipeline, forward, Pass::forward);
  check_coverage(pipeline, backward, Pass::backward);
  plan->forward = route(pipeline, forward);
  plan->backward = route(pipeline, backward);
  mark_gradients(pipeline, plan->ops, plan->backward);

  for (int i = 0; i < pipeline.size(); ++i)
    plan->in_place |= pipeline.op(i).in_place() && pipeline.op(i).extra_inputs() > 0;
  plan->saves = slots_for_backward(pipeline, *plan);
  plan->backward_params = params_for_backward(pipeline, *plan);
  for (int slot = 0; slot < pipeline.num_extra_out(); ++slot)
    plan->extra_out_requires_grad.push_back(plan->ops[pipeline.producer(slot)].needs_grad);
  const auto in_python = [](const PlannedStep& s) { return s.step.fused && s.step.fused->process_local(); };
  plan->process_local = pipeline.process_local() || std::any_of(plan->forward.begin(), plan->forward.end(), in_python);
  plan->output_requires_grad = !plan->ops.empty() ? plan->ops.back().needs_grad : key.tensor_meta(0).requires_grad;
  return plan;
}

}  // namespace weft::fuser
