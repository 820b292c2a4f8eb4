#include "weft/fused/epilogues.h"

#include "weft/core/ownership.h"
#include "weft/ops/leading_dims.h"

namespace weft::fused {

std::string reject_mixed_dtypes(const Match& match, const PlanView& view, int first, int last) {
  const auto dtype = [&](int index) { return view.compute_dtypes[match.first() + index]; };
  const auto text = [&](int index) {
    return std::string(match.op(index)->name()) + " computes in " + std::string(dtype_name(dtype(index)));
  };
  for (int index = first + 1; index <= last; ++index)
    if (dtype(index) != dtype(first)) return text(first) + " and " + text(index);
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

std::string reject_activation(const ops::ActivationOp& activation, int64_t columns) {
  const auto& act = activation.act();
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
  const auto sum = c10::promoteTypes(dtype, g.scalar_type());
  const bool reusable = in_place && sum == g.scalar_type() && g.is_contiguous() && sole_owner(g);
  epilogue.addend = ops::as_matrix(g);
  if (reusable) epilogue.out = epilogue.addend;
  epilogue.dtype = sum;
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

at::Tensor linear_gradients_after_norm(StepContext& ctx, const MatchedOp<ops::BasicLinear>& linear,
                                       const MatchedOp<ops::NormOp>& norm, const ops::Gradient& dp) {
  auto linear_ctx = ctx.op(linear.index), norm_ctx = ctx.op(norm.index);
  auto n = linear_ctx.saved(ops::BasicLinear::kInput);
  if (linear_ctx.needs_param_grad(0) && !n.defined()) n = norm->recompute(norm_ctx, ctx.params(norm.index));
  linear->weight_gradient_of(linear_ctx, dp, n);
  kernels::Epilogue epilogue;
  if (n.defined()) reuse_memory(epilogue, n, n.size(-1));
  return linear->input_gradient(linear_ctx, dp.value, ctx.params(linear.index), std::move(epilogue)).out;
}

}  // namespace weft::fused
