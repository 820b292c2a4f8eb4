#pragma once
#include "weft/fused/epilogues.h"
#include "weft/ops/collectives.h"
#include "weft/overlap/overlap_policy.h"

// Shared by the forward and backward rules that overlap the communication of a linear with its GEMMs.

namespace weft::fused {

/// A BasicLinear in mode column.
Element column_linear();
/// A BasicLinear in mode row, which reduces its output itself.
Element row_linear();
/// A BasicLinear without a mode; together with the collective after it, it forms a row-parallel linear.
Element unsharded_linear();
/// ReduceScatter or AllReduce over more than one rank.
Element cross_rank_reduction();
Element cross_rank_reduce_scatter();

/// Rejects if the user, the environment or the device rules out overlap.
std::string reject_overlap(const Match& match, const PlanView& view);

/// `matrix` [rows, n] reshaped to the leading sizes of `like`, with the first one multiplied by `ranks`, or divided by
/// -ranks if negative.
at::Tensor with_leading_dims(const at::Tensor& matrix, const at::Tensor& like, int ranks);

}  // namespace weft::fused
