#include "weft/fused/epilogues.h"

#include "weft/core/ownership.h"
#include "weft/ops/leading_dims.h"

namespace weft::fused {

std::string first_reason(std::initializer_list<std::string> reasons) {
  for (const auto& reason : reasons)
    if (!reason.empty()) return reason;
  return {};
}

std::string reject_mixed_dtypes(const Match& match, const PlanView& view, int first, int last) {
  const auto dtype = [&](int index) { return view.compute_dtypes[match.first() + index]; };
  const auto describe = [&](int index) {
    return std::string(match.op(index)->name()) + " computes in " + std::string(dtype_name(dtype(index)));
  };
  for (int index = first + 1; index <= last; ++index)
    if (dtype(index) != dtype(first)) return describe(first) + " and " + describe(index);
  return {};
}

std::string reject_reduced_output(const ops::BasicLinear& linear) {
  return linear.reduces_output() ? "the output of BasicLinear is reduced over ranks before the next operation" : "";
}

std::string reject_reduced_gradient(const ops::BasicLinear& linear) {
  return linear.reduces_input_gradient() ? "dx of BasicLinear is reduced over ranks before the next backward step" : "";
}

std::string reject_parallel(const ops::BasicLinear& linear) {
  return linear.parallel() ? "BasicLinear is sharded over ranks" : "";
}

std::string reject_cached_input(const ops::ActivationOp& activation) {
  return activation.caches_quantized_input() ? "cache_quantized_input: the activation saves its input in FP8" : "";
}

std::string reject_activation(const MatchedOp<ops::ActivationOp>& activation, int64_t columns) {
  if (!activation) return {};
  const auto& act = activation->act();
  if (auto reason = reject_cached_input(*activation.op); !reason.empty()) return reason;
  if (act.interleave != 0) return "glu_interleave_size is set; a GEMM epilogue gates contiguous halves only";
  if (act.gated() && columns % 2 != 0)
    return "the gated activation has an odd number of columns (" + std::to_string(columns) + ")";
  return {};
}

void reuse_memory(kernels::Epilogue& epilogue, const at::Tensor& t, int64_t columns) {
  const bool same_dtype = epilogue.dtype == at::ScalarType::Undefined || epilogue.dtype == t.scalar_type();
  const bool reusable = t.size(-1) == columns && t.is_contiguous() && sole_owner(t);
  if (same_dtype && reusable && !epilogue.out.defined()) epilogue.out = ops::as_matrix(t);
}

void set_addend(kernels::Epilogue& epilogue, const at::Tensor& g, bool in_place, at::ScalarType dtype) {
  if (!g.defined()) return;
  const auto sum_dtype = c10::promoteTypes(dtype, g.scalar_type());
  const bool reusable = in_place && sum_dtype == g.scalar_type() && g.is_contiguous() && sole_owner(g);
  epilogue.addend = ops::as_matrix(g);
  if (reusable) epilogue.out = epilogue.addend;
  epilogue.dtype = sum_dtype;
}

void add_extra_input(kernels::Epilogue& epilogue, const ops::AddExtraInput& join, ops::OpContext& ctx,
                     const at::Tensor& x, int64_t columns, at::ScalarType dtype) {
  const auto e = ctx.take_extra_input(0);
  c10::SmallVector<int64_t, 5> sizes(x.sizes().begin(), x.sizes().end());
  if (!sizes.empty()) sizes.back() = columns;
  TORCH_CHECK_VALUE(e.sizes() == at::IntArrayRef(sizes), "input has shape ", at::IntArrayRef(sizes),
                    ", extra input has shape ", e.sizes(), "; expected equal shapes.");
  set_addend(epilogue, e, join.in_place(), dtype);
}

kernels::Epilogue bias_activation(StepContext& ctx, const MatchedOp<ops::Bias>& bias,
                                  const MatchedOp<ops::ActivationOp>& activation) {
  kernels::Epilogue epilogue{.bias = bias_of(ctx, bias)};
  if (!activation) return epilogue;
  epilogue.act = activation->act();
  epilogue.keep_pre_act = ctx.op(activation.index).needs_input_grad();
  return epilogue;
}

at::Tensor save_pre_act(StepContext& ctx, const MatchedOp<ops::ActivationOp>& activation, kernels::GemmResult result) {
  if (result.pre_act.defined()) ctx.op(activation.index).save(ops::ActivationOp::kInput, std::move(result.pre_act));
  return std::move(result.out);
}

at::Tensor bias_activation_gradient(StepContext& ctx, const MatchedOp<ops::Bias>& bias,
                                    const MatchedOp<ops::ActivationOp>& activation, const at::Tensor& dy) {
  auto op = ctx.op(activation.index);
  if (!op.needs_input_grad()) return {};
  const auto& p = op.saved(ops::ActivationOp::kInput);
  if (!bias || !ctx.op(bias.index).needs_param_grad(0)) return kernels::activation_backward(activation->act(), dy, p);
  auto [dp, db] = kernels::activation_backward_column_sums(activation->act(), dy, p);
  bias->set_gradient(ctx.op(bias.index), std::move(db));
  return dp;
}

at::Tensor linear_gradients_after_norm(StepContext& ctx, const MatchedOp<ops::BasicLinear>& linear,
                                       const MatchedOp<ops::NormOp>& norm, const ops::Gradient& dp) {
  auto linear_ctx = ctx.op(linear.index), norm_ctx = ctx.op(norm.index);
  const auto dy = linear->prepare_output_gradient(linear_ctx, dp, ctx.params(linear.index));
  kernels::Epilogue epilogue;
  if (linear_ctx.saved(ops::BasicLinear::kInput).defined()) {
    linear->weight_gradient(linear_ctx, dy);
  } else if (linear_ctx.needs_param_grad(0)) {
    const auto n = norm->recompute(norm_ctx, ctx.params(norm.index));
    linear->weight_gradient_of(linear_ctx, dy, n);
    reuse_memory(epilogue, n, n.size(-1));
  }
  return linear->input_gradient(linear_ctx, dy, ctx.params(linear.index), std::move(epilogue)).out;
}

}  // namespace weft::fused
