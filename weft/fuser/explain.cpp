#include "weft/fuser/explain.h"

#include <c10/core/ScalarType.h>

#include <map>
#include <set>
#include <sstream>

#include "weft/fuser/call_validation.h"
#include "weft/fuser/explain_format.h"
#include "weft/fuser/infer.h"
#include "weft/kernels/packing.h"

namespace weft::fuser {
namespace {

using ops::Spec;

int64_t bytes_of(const Spec& spec) {
  auto bytes = static_cast<int64_t>(c10::elementSize(spec.dtype));
  for (const auto& size : spec.sizes) bytes *= size.maybe_as_int().value_or(0);
  return bytes;
}

/// The fastest tier among the operations of a step; of equal tiers, the one with the longest rejection reason.
kernels::TierChoice fastest_tier(const std::vector<kernels::TierChoice>& choices) {
  kernels::TierChoice fastest;
  for (const auto& choice : choices)
    if (choice.tier < fastest.tier ||
        (choice.tier == fastest.tier && choice.rejection_reason.size() > fastest.rejection_reason.size()))
      fastest = choice;
  return fastest;
}

/// The dtype in which operation i multiplies: quantized values are exact in bfloat16.
at::ScalarType gemm_dtype(const fused::PlanView& view, int i, bool backward) {
  const auto* recipe = view.plans[i].recipe;
  return recipe && !(backward && recipe->backward_override) ? at::kBFloat16 : view.compute_dtypes[i];
}

/// One line per step, with the fastest kernel tier of its operations.
std::vector<Explanation::StepLine> lines(const Pipeline& pipeline, const std::vector<PlannedStep>& steps,
                                         const fused::PlanView& view, bool backward) {
  const auto device = view.key.tensor_meta(0).device;
  const auto& report = backward ? pipeline.report().backward : pipeline.report().forward;
  std::vector<Explanation::StepLine> list;
  for (const auto& planned : steps) {
    const auto& step = planned.step;
    const auto name = step.fused ? step.rule : std::string(pipeline.op(step.first).name());
    const bool in_python = step.fused ? step.fused->process_local() : pipeline.op(step.first).process_local();
    std::vector<kernels::TierChoice> choices;
    for (int i = step.first; i < step.first + step.count; ++i)
      choices.push_back(
          pipeline.op(i).kernel({device, gemm_dtype(view, i, backward), backward, view.plans[i].training}));
    const auto choice = step.fused ? fastest_tier(choices) : choices.front();
    list.push_back({step.first, step.count, name, bool(step.fused),
                    in_python ? "python" : std::string(kernels::tier_name(choice.tier)),
                    in_python ? "" : choice.rejection_reason, !backward || planned.needs_grad, step.min_rows,
                    report.get(step.first, step.rule)});
  }
  return list;
}

/// Lists the tensors saved for backward, and counts the bytes of each storage once.
void list_saved(Explanation& out, const Pipeline& pipeline, const Plan& plan, const at::Tensor& x, ops::Params params,
                c10::ArrayRef<at::Tensor> extras) {
  out.saved_known = !plan.process_local;
  const auto shapes = out.saved_known ? infer(pipeline, plan, x, params, extras) : CallShapes{};
  std::set<std::pair<int, at::ScalarType>> listed;  // saved inputs: operation that produced it, dtype
  for (const auto& slot : shapes.saved) {
    if (!slot.spec) continue;
    std::string shared;
    if (slot.is_caller_input()) {
      shared = "the caller's input";
    } else if (slot.from == ops::SavedFrom::parameter) {
      shared = param_name(pipeline, slot.index);
    } else if (slot.from == ops::SavedFrom::input && !listed.emplace(slot.index, slot.spec->dtype).second) {
      shared = "a tensor listed above";
    }
    out.saved.push_back({slot.op, slot.name, c10::str(slot.spec->sizes), std::string(dtype_name(slot.spec->dtype)),
                         shared.empty() ? bytes_of(*slot.spec) : 0, shared});
  }
}

/// Sets the size of the packed copies of frozen weights that the AMX tier caches between calls, and whether a step uses
/// this tier.
void add_packed_weights(Explanation& out) {
  for (const auto* steps : {&out.forward, &out.backward})
    for (const auto& step : *steps) out.packs |= step.runs && step.tier == kernels::tier_name(kernels::Tier::amx);
  out.packed_bytes = kernels::packed_bytes();
  out.packing_limit = kernels::packing_limit();
}

/// Why operation `consumer` cannot overwrite the value of an extra-output slot: what else references it. Empty if it
/// can.
std::string other_reference(const Pipeline& pipeline, const Plan& plan, int slot, int consumer) {
  const int producer = pipeline.producer(slot);
  const auto origins = value_origins(pipeline, plan);
  if (pipeline.output(slot).to_caller) return "it is also returned to the caller";
  for (int s = 0; s < pipeline.num_extra_in(); ++s)
    if (pipeline.source(s) == slot && pipeline.consumer(s) != consumer)
      return "operation " + std::to_string(pipeline.consumer(s)) + " (" +
             std::string(pipeline.op(pipeline.consumer(s)).name()) + ") also reads it";
  if (!pipeline.op(producer).output_is_input(plan.ops[producer])) return {};
  if (origins[producer] < 0) return "it aliases the caller's input";
  for (int i = producer + 1; i < consumer; ++i) {
    if (origins[i] != origins[producer]) break;
    if (plan.ops[i].needs_grad && !pipeline.op(i).saved_names().empty())
      return "operation " + std::to_string(i) + " (" + std::string(pipeline.op(i).name()) + ") saves it for backward";
  }
  return {};
}

/// Whether an in-place operation writes into its extra tensor or copies it, and why.
std::string in_place_note(const Pipeline& pipeline, const Plan& plan, int i) {
  const auto& op = pipeline.op(i);
  if (op.extra_outputs() > 0)
    return "backward adds into the gradient of the extra output if it is not referenced elsewhere, otherwise copies";
  const int from = pipeline.source(pipeline.extra_in_base(i));
  if (from < 0) return "writes into the extra input if the caller holds no reference to it, otherwise copies";
  const auto reason = other_reference(pipeline, plan, from, i);
  const auto channel = "channel '" + pipeline.output(from).channel + "'";
  return reason.empty() ? "writes into " + channel : "copies " + channel + ": " + reason;
}

std::string pad(const std::string& text, size_t width) {
  return text.size() < width ? text + std::string(width - text.size(), ' ') : text;
}

void print_steps(std::ostream& text, const std::vector<Explanation::StepLine>& steps) {
  for (const auto& step : steps) {
    text << "  " << pad(format_range(step.first, step.count), 8) << pad(step.name, 28);
    text << (step.runs ? "[" + step.tier + "]" : "skipped: no gradient needed");
    if (step.min_rows > 0) text << " for " << step.min_rows << " rows or more";
    text << "\n";
    if (!step.note.empty()) text << "          " << step.note << "\n";
  }
}

/// Each reason once, with the steps it applies to.
void print_tier_rejections(std::ostream& text, const Explanation& e) {
  std::map<std::string, std::string> ranges_of;
  std::vector<std::string> reasons;
  for (const auto* steps : {&e.forward, &e.backward}) {
    for (const auto& step : *steps) {
      if (step.tier_rejection.empty() || !step.runs) continue;
      auto& ranges = ranges_of[step.tier_rejection];
      if (ranges.empty()) reasons.push_back(step.tier_rejection);
      const auto here = format_range(step.first, step.count);
      if ((", " + ranges + ",").find(", " + here + ",") == std::string::npos)
        ranges += (ranges.empty() ? "" : ", ") + here;
    }
  }
  if (!reasons.empty()) text << "faster kernels not used\n";
  for (const auto& reason : reasons) text << "  " << ranges_of[reason] << ": " << reason << "\n";
}

}  // namespace

int64_t Explanation::saved_bytes() const {
  int64_t bytes = 0;
  for (const auto& line : saved) bytes += line.bytes;
  return bytes;
}

std::string Explanation::saved_text() const {
  return saved_known ? format_bytes(saved_bytes()) : "unknown: an operation is written in Python";
}

Explanation explain(Fuser& fuser, const at::Tensor& x, ops::Params params, c10::ArrayRef<at::Tensor> extras,
                    uint64_t eval_mask) {
  return explain(fuser.pipeline(), *fuser.plan(x, params, extras, eval_mask), x, params, extras);
}

Explanation explain(const Pipeline& pipeline, const Plan& plan, const at::Tensor& x, ops::Params params,
                    c10::ArrayRef<at::Tensor> extras) {
  Explanation out;
  for (const auto& stage : pipeline.stages()) {
    out.ops.push_back(stage.op->brief());
    out.op_names.emplace_back(stage.op->name());
  }
  const auto plan_view = make_plan_view(pipeline, plan.key, plan.ops);
  out.forward = lines(pipeline, plan.forward, plan_view, false);
  out.backward = lines(pipeline, plan.backward, plan_view, true);
  out.rejections = plan.rejections;
  for (int s = 0; s < pipeline.num_extra_in(); ++s)
    if (const int from = pipeline.source(s); from >= 0)
      out.channels.push_back({pipeline.producer(from), pipeline.consumer(s), pipeline.output(from).channel});
  for (const int slot : pipeline.caller_inputs()) out.from_caller.push_back(pipeline.consumer(slot));
  for (const int slot : pipeline.caller_outputs()) out.to_caller.push_back(pipeline.producer(slot));
  for (int i = 0; i < pipeline.size(); ++i)
    if (plan.ops[i].recipe) out.quantized.push_back({i, plan.ops[i].recipe->text()});
  for (int i = 0; i < pipeline.size(); ++i)
    if (pipeline.op(i).in_place()) out.in_place.push_back({i, in_place_note(pipeline, plan, i)});
  list_saved(out, pipeline, plan, x, params, extras);
  add_packed_weights(out);
  return out;
}

std::string Explanation::text() const {
  std::ostringstream text;
  text << "operations\n";
  for (size_t i = 0; i < ops.size(); ++i) text << "  " << pad(std::to_string(i), 8) << ops[i] << "\n";
  text << "forward\n";
  print_steps(text, forward);
  text << "backward (from the last line to the first)\n";
  print_steps(text, backward);
  print_tier_rejections(text, *this);
  if (!channels.empty()) text << "channels\n";
  for (const auto& c : channels)
    text << "  " << pad(std::to_string(c.from) + " -> " + std::to_string(c.to), 8) << c.name << "\n";
  if (!from_caller.empty()) text << "extra inputs from the caller\n";
  for (const int op : from_caller) text << "  " << pad(std::to_string(op), 8) << op_names[op] << "\n";
  if (!to_caller.empty()) text << "extra outputs to the caller\n";
  for (const int op : to_caller) text << "  " << pad(std::to_string(op), 8) << op_names[op] << "\n";
  if (!rejections.empty()) text << "rejected\n";
  for (const auto& r : rejections)
    text << "  " << pad(format_range(r.first, r.count), 8) << r.rule << " (" << fused::pass_name(r.pass)
         << "): " << r.reason << "\n";
  for (const auto& [title, notes] : {std::pair{"quantized\n", &quantized}, std::pair{"in place\n", &in_place}}) {
    if (!notes->empty()) text << title;
    for (const auto& note : *notes)
      text << "  " << pad(std::to_string(note.op), 8) << op_names[note.op] << ": " << note.text << "\n";
  }
  text << "saved for backward: " << saved_text() << "\n";
  for (const auto& line : saved) {
    text << "  " << pad(std::to_string(line.op), 8) << pad(op_names[line.op] + " " + line.name, 28) << line.sizes << " "
         << line.dtype << "  ";
    text << (line.shared.empty() ? format_bytes(line.bytes) : "aliases " + line.shared) << "\n";
  }
  if (packs && packed_bytes > 0)
    text << "packed weights: " << format_bytes(packed_bytes) << " cached (limit " << format_bytes(packing_limit)
         << ")\n";
  return text.str();
}

}  // namespace weft::fuser
