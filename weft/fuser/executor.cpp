#include "weft/fuser/executor.h"

#include <ATen/ops/add.h>
#include <ATen/record_function.h>

#include <optional>

#include "weft/core/errors.h"
#include "weft/core/ownership.h"

namespace weft::fuser {
namespace {

using fused::Step;
using fused::StepContext;
using ops::Frame;
using ops::Gradient;
using ops::OpContext;
using ops::Params;

Params params_of(const ops::OpPlan& plan, const Frame& frame) {
  return {frame.params + plan.param_base, plan.needs_param_grad.size()};
}

/// Whether torch.profiler runs in this pass, and what its ranges end with. Checked once per pass.
struct Profiler {
  const char* suffix;
  bool runs = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
};

/// A range of torch.profiler, if it runs: "weft::mlp_block", "weft::GELU backward".
class ProfilerRange {
 public:
  ProfilerRange(const Profiler& profiler, std::string_view name) {
    if (!profiler.runs) return;
    range_.emplace(at::RecordScope::FUNCTION);
    if (range_->isActive()) range_->before("weft::" + std::string(name) + profiler.suffix);
  }

 private:
  std::optional<at::RecordFunction> range_;
};

bool enough_rows(const Step& step, const at::Tensor& t) {
  return step.min_rows == 0 || ops::has_rows(t.sizes(), step.min_rows);
}

/// Whether the fused operation runs in backward. Below `min_rows` the basic operations run instead; a joint operation
/// ran in forward if its first additional slot is filled.
bool fused_backward(const Step& step, const Frame& frame, const at::Tensor& dy) {
  if (!step.fused) return false;
  if (step.own_base >= 0 && step.min_rows > 0) return frame.saved[step.own_base].defined();
  return step.min_rows == 0 || (dy.defined() && enough_rows(step, dy));
}

bool any_gradient(const Pipeline& pipeline, const Frame& frame, int op, const at::Tensor& dy) {
  if (dy.defined()) return true;
  for (int slot = pipeline.extra_out_base(op); slot < pipeline.extra_out_base(op + 1); ++slot)
    if (frame.extra_out[slot].defined()) return true;
  return false;
}

Gradient backward_unfused(const Pipeline& pipeline, const Plan& plan, Frame& frame, const Step& step, Gradient dy,
                          const Profiler& profiler) {
  for (int i = step.first + step.count - 1; i >= step.first; --i) {
    if (!any_gradient(pipeline, frame, i, dy.value)) continue;
    OpContext ctx(plan.ops[i], frame, i, nullptr, &dy.packed);
    const ProfilerRange range(profiler, pipeline.op(i).name());
    dy = with_label(pipeline.label(i),
                    [&] { return pipeline.op(i).backward(ctx, dy.value, params_of(plan.ops[i], frame)); });
  }
  return dy;
}

void accumulate(at::Tensor& sum, at::Tensor grad) {
  if (!grad.defined()) return;
  if (!sum.defined()) {
    sum = std::move(grad);
  } else if (sole_owner(sum) && sum.scalar_type() == grad.scalar_type()) {
    sum.add_(grad);
  } else {
    sum = at::add(sum, grad);
  }
}

void check_delivered(const Pipeline& pipeline, const Frame& frame, const PlannedStep& planned) {
  for (const int slot : planned.needed_slots) {
    if (frame.extra_out[slot].defined()) continue;
    const auto& out = pipeline.output(slot);
    const int op = pipeline.producer(slot);
    TORCH_CHECK(!out.to_caller, "Fused operation '", planned.step.rule, "' did not set an extra output of ",
                pipeline.label(op), " that is returned to the caller.");
    TORCH_CHECK(false, "Fused operation '", planned.step.rule, "' did not set channel '", out.channel, "' of ",
                pipeline.label(op), ", which is read outside the fusion.");
  }
}

void drop_saved(const Pipeline& pipeline, Frame& frame, const Step& step) {
  for (int slot = pipeline.saved_base(step.first); slot < pipeline.saved_base(step.first + step.count); ++slot)
    frame.saved[slot].reset();
}

/// Raises the error of the operation that does not support the sizes of a fused step's input, if `infer` finds one.
void check_sizes(const Pipeline& pipeline, const Plan& plan, const Frame& frame, const Step& step,
                 const at::Tensor& x) {
  auto spec = ops::Spec::of(x);
  for (int i = step.first; i < step.first + step.count; ++i) {
    std::vector<ops::Spec> extras, params;
    for (int slot = pipeline.extra_in_base(i); slot < pipeline.extra_in_base(i + 1); ++slot) {
      if (!frame.extra_in[slot].defined()) return;  // the step has used it already
      extras.push_back(ops::Spec::of(frame.extra_in[slot]));
    }
    for (const auto& param : params_of(plan.ops[i], frame)) params.push_back(ops::Spec::of(param));
    spec = with_label(pipeline.label(i), [&] { return pipeline.op(i).infer(plan.ops[i], spec, extras, params).y; });
  }
}

at::Tensor forward_fused(const Pipeline& pipeline, const Plan& plan, Frame& frame, const Step& step,
                         const at::Tensor& x, const Profiler& profiler) {
  StepContext ctx(plan.ops.data(), frame, plan.saves.data(), step);
  const ProfilerRange range(profiler, step.rule);
  try {
    return step.fused.forward->forward(ctx, x);
  } catch (c10::Error& error) {
    if (!step.fused->process_local()) check_sizes(pipeline, plan, frame, step, x);
    rethrow_with_label(pipeline.labels(step.first, step.count), error);
  }
}

}  // namespace

at::Tensor run_forward(const Pipeline& pipeline, const Plan& plan, Frame& frame, at::Tensor x) {
  const Profiler profiler{""};
  for (const auto& planned : plan.forward) {
    const auto& step = planned.step;
    for (const auto& route : planned.routes)
      frame.extra_in[route.to] = route.last ? std::move(frame.extra_out[route.from]) : frame.extra_out[route.from];
    if (step.fused && enough_rows(step, x)) {
      if (plan.process_local) check_dtype(pipeline, step.first, "input", x.scalar_type());
      x = forward_fused(pipeline, plan, frame, step, x, profiler);
      check_delivered(pipeline, frame, planned);
    } else {
      for (int i = step.first; i < step.first + step.count; ++i) {
        if (plan.process_local) check_dtype(pipeline, i, "input", x.scalar_type());  // not known to the plan
        OpContext ctx(plan.ops[i], frame, i);
        const ProfilerRange range(profiler, pipeline.op(i).name());
        x = with_label(pipeline.label(i),
                       [&] { return pipeline.op(i).forward(ctx, x, params_of(plan.ops[i], frame)); });
      }
    }
    for (const auto& route : planned.routes) frame.extra_in[route.to].reset();
  }
  return x;
}

namespace {

Gradient backward_fused(const Pipeline& pipeline, const Plan& plan, Frame& frame, const PlannedStep& planned,
                        const Gradient& dy, const Profiler& profiler) {
  const auto& step = planned.step;
  StepContext ctx(plan.ops.data(), frame, plan.saves.data(), step, planned.packed_dx_min_rows);
  const ProfilerRange range(profiler, step.rule);
  try {
    return step.fused.backward->backward(ctx, dy);
  } catch (c10::Error& error) {
    rethrow_with_label(pipeline.labels(step.first, step.count), error);
  }
}

at::Tensor run_backward_steps(const Pipeline& pipeline, const Plan& plan, Frame& frame, Gradient dy) {
  const Profiler profiler{" backward"};
  for (auto planned = plan.backward.rbegin(); planned != plan.backward.rend(); ++planned) {
    const auto& step = planned->step;
    bool any = dy.value.defined();
    for (const int slot : planned->grad_slots) any |= frame.extra_out[slot].defined();
    if (!planned->needs_grad || !any) {
      dy = {};
      continue;
    }
    if (fused_backward(step, frame, dy.value)) {
      dy = backward_fused(pipeline, plan, frame, *planned, dy, profiler);
    } else {
      dy = backward_unfused(pipeline, plan, frame, step, std::move(dy), profiler);
    }
    if (!plan.ops[step.first].needs_input_grad) dy = {};
    for (const auto& route : planned->routes)
      accumulate(frame.extra_out[route.from], std::move(frame.extra_in[route.to]));
    drop_saved(pipeline, frame, step);
  }
  return dy.value;
}

/// Error context that lists the weight gradients already added to main_grad when backward failed.
std::string added_to_main_grad_text(const Pipeline& pipeline, const std::vector<int>& ops) {
  std::vector<std::string> labels;
  for (const int op : ops) labels.push_back(pipeline.label(op));
  return "The weight gradients of " + join(labels) + " were already added to main_grad; no others were.";
}

}  // namespace

at::Tensor run_backward(const Pipeline& pipeline, const Plan& plan, Frame& frame, at::Tensor dy) {
  try {
    return run_backward_steps(pipeline, plan, frame, std::move(dy));
  } catch (c10::Error& error) {
    if (!frame.added_to_main_grad.empty())
      error.add_context(added_to_main_grad_text(pipeline, frame.added_to_main_grad));
    throw;
  }
}

}  // namespace weft::fuser
