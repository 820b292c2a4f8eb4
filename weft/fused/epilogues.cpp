#include "weft/fused/epilogues.h"

#include "weft/ops/rows.h"
#include "weft/tensor/ownership.h"

namespace weft::fused {

std::string refuse_mixed_dtypes(const Match& match, const PlanView& view, int first, int last) {
  const auto dtype = [&](int part) { return view.compute_dtypes[match.first() + part]; };
  const auto words = [&](int part) {
    return std::string(match.op(part)->name()) + " computes in " + std::string(dtype_name(dtype(part)));
  };
  for (int part = first + 1; part <= last; ++part)
    if (dtype(part) != dtype(first)) return words(first) + " and " + words(part);
  return {};
}

std::string refuse_summed_output(const ops::BasicLinear& linear) {
  return linear.sums_output() ? "the product is summed over ranks before what follows it" : "";
}

std::string refuse_summed_gradient(const ops::BasicLinear& linear) {
  return linear.sums_input_gradient() ? "dx is summed over ranks before what comes next" : "";
}

std::string refuse_parallel(const ops::BasicLinear& linear) {
  return linear.parallel() ? "BasicLinear is split over ranks" : "";
}

std::string refuse_activation(const ops::ActivationOp& activation, int64_t columns) {
  const auto& act = activation.act();
  if (act.interleave != 0) return "glu_interleave_size is set; a GEMM gates halves only";
  if (act.gated() && columns % 2 != 0) return "a gated activation of " + std::to_string(columns) + " columns";
  return {};
}

void write_over(kernels::Epilogue& epilogue, const at::Tensor& t, int64_t columns) {
  const bool same_dtype = epilogue.dtype == at::ScalarType::Undefined || epilogue.dtype == t.scalar_type();
  const bool ours = t.size(-1) == columns && t.is_contiguous() && sole_owner(t);
  if (same_dtype && ours && !epilogue.out.defined()) epilogue.out = ops::as_matrix(t);
}

void add_to(kernels::Epilogue& epilogue, const at::Tensor& g, bool in_place, at::ScalarType dtype) {
  if (!g.defined()) return;
  const auto sum = c10::promoteTypes(dtype, g.scalar_type());
  const bool ours = in_place && sum == g.scalar_type() && g.is_contiguous() && sole_owner(g);
  epilogue.add = ops::as_matrix(g);
  if (ours) epilogue.out = epilogue.add;
  epilogue.dtype = sum;
}

void add_extra_input(kernels::Epilogue& epilogue, const ops::AddExtraInput& join, ops::OpContext& ctx,
                     const at::Tensor& x, int64_t columns, at::ScalarType dtype) {
  const auto e = ctx.take_extra_input(0);
  c10::SmallVector<int64_t, 5> sizes(x.sizes().begin(), x.sizes().end());
  if (!sizes.empty()) sizes.back() = columns;
  TORCH_CHECK_VALUE(e.sizes() == at::IntArrayRef(sizes), "AddExtraInput: input has shape ", at::IntArrayRef(sizes),
                    ", extra input has shape ", e.sizes(), "; they must be equal.");
  add_to(epilogue, e, join.in_place(), dtype);
}

void hand_over(StepContext& ctx, const kernels::GemmResult& result) {
  if (result.tiles.defined()) ctx.op(0).frame().tiled = {result.out, result.tiles};
}

at::Tensor gradients_behind_norm(StepContext& ctx, const Part<ops::BasicLinear>& linear, const Part<ops::NormOp>& norm,
                                 const at::Tensor& dp) {
  auto product = ctx.op(linear.at), before = ctx.op(norm.at);
  auto n = product.saved(ops::BasicLinear::kInput);
  if (product.param_wanted(0) && !n.defined()) n = norm->again(before, ctx.params(norm.at));
  linear->weight_gradient_of(product, dp, n);
  kernels::Epilogue epilogue;
  if (n.defined()) write_over(epilogue, n, n.size(-1));
  return linear->input_gradient(product, dp, ctx.params(linear.at), std::move(epilogue)).out;
}

}  // namespace weft::fused
