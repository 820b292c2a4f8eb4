#pragma once
#include "weft/fused/rule.h"
#include "weft/kernels/gemm.h"
#include "weft/ops/activation_op.h"
#include "weft/ops/add_extra_input.h"
#include "weft/ops/basic_linear.h"
#include "weft/ops/bias.h"
#include "weft/ops/norm.h"

// Shared by the fused linears: rejection reasons and helpers that fill an epilogue.

namespace weft::fused {

// The reject_* functions return a rejection reason, or an empty string if the fusion applies.

/// The first reason that is not empty.
std::string first_reason(std::initializer_list<std::string> reasons);

/// Rejects unless matched operations `first` to `last` compute in one dtype.
std::string reject_mixed_dtypes(const Match& match, const PlanView& view, int first, int last);

/// Rejects a linear whose output is reduced over ranks before the next operation.
std::string reject_reduced_output(const ops::BasicLinear& linear);
/// Rejects a linear whose dx is reduced over ranks before the next backward step.
std::string reject_reduced_gradient(const ops::BasicLinear& linear);
/// Rejects a linear that is sharded over ranks.
std::string reject_parallel(const ops::BasicLinear& linear);

/// Rejects unless a GEMM epilogue can compute the activation, if there is one, or its gradient, on an input of
/// `columns` columns.
std::string reject_activation(const MatchedOp<ops::ActivationOp>& activation, int64_t columns);

/// Writes a result of `columns` columns and the dtype and row count of t into the memory of t, if t is not referenced
/// elsewhere. The GEMM must not read t.
void reuse_memory(kernels::Epilogue& epilogue, const at::Tensor& t, int64_t columns);

/// Adds g to a result of `dtype` in the epilogue. The sum is written into g if `in_place`, g is not referenced
/// elsewhere and has the promoted dtype. An undefined g has no effect.
void set_addend(kernels::Epilogue& epilogue, const at::Tensor& g, bool in_place, at::ScalarType dtype);

/// The same for the extra input of `join`, which must have the leading sizes of x and `columns` columns.
void add_extra_input(kernels::Epilogue& epilogue, const ops::AddExtraInput& join, ops::OpContext& ctx,
                     const at::Tensor& x, int64_t columns, at::ScalarType dtype);

/// y = act(p), p = · + b, each if present, in the epilogue of a GEMM, which keeps p if backward reads it.
kernels::Epilogue bias_activation(StepContext& ctx, const MatchedOp<ops::Bias>& bias,
                                  const MatchedOp<ops::ActivationOp>& activation);
/// Saves p if the GEMM kept it, and returns y.
at::Tensor save_pre_act(StepContext& ctx, const MatchedOp<ops::ActivationOp>& activation, kernels::GemmResult result);

/// dp = dy·act'(p) and, if needed, db = Σ_rows dp in one pass; undefined if dp is not needed.
at::Tensor bias_activation_gradient(StepContext& ctx, const MatchedOp<ops::Bias>& bias,
                                    const MatchedOp<ops::ActivationOp>& activation, const at::Tensor& dy);

/// dn = dp W and dW = dpᵀ n, where n is the saved input of `linear`, recomputed by the norm if it was not saved.
at::Tensor linear_gradients_after_norm(StepContext& ctx, const MatchedOp<ops::BasicLinear>& linear,
                                       const MatchedOp<ops::NormOp>& norm, const ops::Gradient& dp);

/// The bias of an optional Bias operation, or an undefined tensor.
inline at::Tensor bias_of(const StepContext& ctx, const MatchedOp<ops::Bias>& bias) {
  return bias ? ctx.params(bias.index)[0] : at::Tensor{};
}

}  // namespace weft::fused
