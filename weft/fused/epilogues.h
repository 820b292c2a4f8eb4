#pragma once
#include "weft/fused/rule.h"
#include "weft/kernels/gemm.h"
#include "weft/ops/activation_op.h"
#include "weft/ops/add_extra_input.h"
#include "weft/ops/basic_linear.h"
#include "weft/ops/bias.h"
#include "weft/ops/norm.h"

// What the fused linears share: reasons to refuse, and the parts of an epilogue.

namespace weft::fused {

/// A reason unless parts `first` to `last` compute in one dtype.
std::string reject_mixed_dtypes(const Match& match, const PlanView& view, int first, int last);

/// Linears over several ranks, where a GEMM's epilogue sees too little:
/// a reason if the product is summed over ranks before what follows,
std::string reject_reduced_output(const ops::BasicLinear& linear);
/// a reason if dx is summed over ranks before what comes next in backward,
std::string reject_reduced_gradient(const ops::BasicLinear& linear);
/// a reason if anything passes between ranks.
std::string reject_parallel(const ops::BasicLinear& linear);

/// A reason unless a GEMM's epilogue can compute the activation on `columns` columns before it, or its slope.
std::string reject_activation(const ops::ActivationOp& activation, int64_t columns);

/// Lets a result of `columns` columns and the dtype of t be written where t lies, if nobody else can see t, whose rows
/// are as many. The product itself must not read t.
void reuse_memory(kernels::Epilogue& epilogue, const at::Tensor& t, int64_t columns);

/// Lets the epilogue add g to a result of `dtype`. Written into g itself if that is permitted, nobody else can see it
/// and its dtype holds the sum. An undefined g changes nothing.
void set_addend(kernels::Epilogue& epilogue, const at::Tensor& g, bool in_place, at::ScalarType dtype);

/// The same for the extra input of `join`, whose sizes must be the leading ones of x and `columns`.
void add_extra_input(kernels::Epilogue& epilogue, const ops::AddExtraInput& join, ops::OpContext& ctx,
                     const at::Tensor& x, int64_t columns, at::ScalarType dtype);

/// dn = dp W, and dW = dpᵀ n with n from `linear`'s slot, or computed again by the norm before it if that was not kept.
at::Tensor linear_gradients_after_norm(StepContext& ctx, const MatchedOp<ops::BasicLinear>& linear,
                                       const MatchedOp<ops::NormOp>& norm, const at::Tensor& dp);

/// Leaves the gradient `result.out` to the step that computes with it next, in tiles too if it was made so.
void forward_packed_grad(StepContext& ctx, const kernels::GemmResult& result);

/// The bias of an optional part, or an undefined tensor.
inline at::Tensor bias_of(const StepContext& ctx, const MatchedOp<ops::Bias>& bias) {
  return bias ? ctx.params(bias.index)[0] : at::Tensor{};
}

}  // namespace weft::fused
