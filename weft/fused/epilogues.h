#pragma once
#include "weft/fused/rule.h"
#include "weft/kernels/gemm.h"
#include "weft/ops/activation_op.h"
#include "weft/ops/add_extra_input.h"
#include "weft/ops/basic_linear.h"
#include "weft/ops/bias.h"
#include "weft/ops/norm.h"

// Shared by fusions of linears: rejection reasons, and functions that fill the epilogue of a GEMM.

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

/// Rejects an activation that saves its input in FP8: what it saves and reads is not what a fused operation would.
std::string reject_cached_input(const ops::ActivationOp& activation);
/// Rejects an activation that a GEMM epilogue cannot apply to an input of `columns` columns, or whose gradient it
/// cannot compute. Accepts if there is no activation.
std::string reject_activation(const MatchedOp<ops::ActivationOp>& activation, int64_t columns);

/// Lets the GEMM write its result [rows of t, columns] into t, and in the dtype of t. No effect unless t has `columns`
/// columns and `epilogue.dtype` (if set), is contiguous and is not referenced elsewhere. The GEMM must not read t.
void reuse_memory(kernels::Epilogue& epilogue, const at::Tensor& t, int64_t columns);

/// Adds g to a result of `dtype` in the epilogue; the sum has the promoted dtype of both. It is written into g if
/// `in_place`, and g has that dtype, is contiguous and is not referenced elsewhere. An undefined g has no effect.
void set_addend(kernels::Epilogue& epilogue, const at::Tensor& g, bool in_place, at::ScalarType dtype);

/// The same for the extra input of `join`. Raises ValueError unless it has the leading sizes of x and `columns`
/// columns.
void add_extra_input(kernels::Epilogue& epilogue, const ops::AddExtraInput& join, ops::OpContext& ctx,
                     const at::Tensor& x, int64_t columns, at::ScalarType dtype);

/// The epilogue y = act(p), p = P + b of a GEMM with product P. Bias and activation are optional. Keeps p if backward
/// reads it.
kernels::Epilogue bias_activation(StepContext& ctx, const MatchedOp<ops::Bias>& bias,
                                  const MatchedOp<ops::ActivationOp>& activation);
/// Saves p, if the GEMM with this epilogue kept it, as the input of the activation, and returns y.
at::Tensor save_pre_act(StepContext& ctx, const MatchedOp<ops::ActivationOp>& activation, kernels::GemmResult result);

/// Backward of y = act(p), p = P + b: returns dp = dy·act'(p), undefined if not needed, and sets db = Σ_rows dp if
/// needed, in one pass.
at::Tensor bias_activation_gradient(StepContext& ctx, const MatchedOp<ops::Bias>& bias,
                                    const MatchedOp<ops::ActivationOp>& activation, const at::Tensor& dy);

/// Backward of p = n Wᵀ, n = norm(x): sets dW = dpᵀ n and returns dn = dp W, undefined if not needed. n is the saved
/// input of `linear`, or is recomputed from the saved x if it was not saved.
at::Tensor linear_gradients_after_norm(StepContext& ctx, const MatchedOp<ops::BasicLinear>& linear,
                                       const MatchedOp<ops::NormOp>& norm, const ops::Gradient& dp);

/// The bias of an optional Bias operation, or an undefined tensor.
inline at::Tensor bias_of(const StepContext& ctx, const MatchedOp<ops::Bias>& bias) {
  return bias ? ctx.params(bias.index)[0] : at::Tensor{};
}

}  // namespace weft::fused
