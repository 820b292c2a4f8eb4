#include "weft/fuser/infer.h"

#include "weft/core/errors.h"
#include "weft/fuser/call_validation.h"

namespace weft::fuser {

using ops::Spec;

std::vector<int> value_origins(const Pipeline& pipeline, const Plan& plan) {
  std::vector<int> made_by{-1};
  for (int i = 0; i < pipeline.size(); ++i)
    made_by.push_back(pipeline.op(i).output_is_input(plan.ops[i]) ? made_by.back() : i);
  return made_by;
}

CallShapes infer(const Pipeline& pipeline, const Plan& plan, Spec x, const std::vector<Spec>& params,
                 const std::vector<Spec>& extras) {
  TORCH_CHECK_NOT_IMPLEMENTED(plan.num_saved == pipeline.num_saved(),
                              "Pipeline: cannot infer the sizes that a joint fused operation saves.");
  check_counts(pipeline, params.size(), extras.size());
  for (size_t p = 0; p < params.size(); ++p) {
    const auto& shape = pipeline.params()[p].shape;
    const std::vector<c10::SymInt> expected(shape.begin(), shape.end());
    const bool fits = pipeline.params()[p].any_shape || ops::same_sizes(params[p].sizes, expected);
    TORCH_CHECK_VALUE(fits, "weft: ", param_name(pipeline, static_cast<int>(p)), " has shape ", params[p].sizes,
                      ", expected ", at::IntArrayRef(shape), ".");
  }
  std::vector<Spec> extra_in(pipeline.num_extra_in()), extra_out(pipeline.num_extra_out());
  for (size_t k = 0; k < extras.size(); ++k) extra_in[pipeline.caller_inputs()[k]] = extras[k];
  const auto slice = [](const std::vector<Spec>& all, int from, int to) {
    return c10::ArrayRef<Spec>(all.data() + from, static_cast<size_t>(to - from));
  };
  const auto made_by = value_origins(pipeline, plan);
  CallShapes out;
  for (int i = 0; i < pipeline.size(); ++i) {
    for (int s = pipeline.extra_in_base(i); s < pipeline.extra_in_base(i + 1); ++s)
      if (pipeline.source(s) >= 0) extra_in[s] = extra_out[pipeline.source(s)];
    const auto extra = slice(extra_in, pipeline.extra_in_base(i), pipeline.extra_in_base(i + 1));
    auto made = with_label(pipeline.label(i), [&] {
      return pipeline.op(i).infer(plan.ops[i], x, extra,
                                  slice(params, pipeline.param_base(i), pipeline.param_base(i + 1)));
    });
    const auto flops = pipeline.op(i).flops(plan.ops[i], x, extra);
    out.flops.forward += flops.forward;
    out.flops.backward += flops.backward;
    const auto names = pipeline.op(i).saved_names();
    for (size_t k = 0; k < names.size(); ++k) {
      auto& slot = out.saved.emplace_back(SavedSlot{i, names[k]});
      if (!made.saved[k] || !plan.saves[pipeline.saved_base(i) + k]) continue;
      slot.from = made.saved[k]->from;
      slot.index = slot.from == ops::SavedFrom::input ? made_by[i] : pipeline.param_base(i) + made.saved[k]->param;
      slot.spec = *std::move(made.saved[k]);
    }
    for (size_t k = 0; k < made.extra_outputs.size(); ++k)
      extra_out[pipeline.extra_out_base(i) + k] = made.extra_outputs[k];
    x = std::move(made.y);
  }
  out.outputs.push_back(std::move(x));
  for (const int slot : pipeline.caller_outputs()) out.outputs.push_back(extra_out[slot]);
  return out;
}

CallShapes infer(const Pipeline& pipeline, const Plan& plan, const at::Tensor& x, c10::ArrayRef<at::Tensor> params,
                 c10::ArrayRef<at::Tensor> extras) {
  const auto specs = [](c10::ArrayRef<at::Tensor> tensors) {
    std::vector<Spec> list;
    for (const auto& t : tensors) list.push_back(Spec::of(t));
    return list;
  };
  return infer(pipeline, plan, Spec::of(x), specs(params), specs(extras));
}

}  // namespace weft::fuser
