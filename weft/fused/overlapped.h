#pragma once
#include "weft/fused/epilogues.h"
#include "weft/ops/collectives.h"
#include "weft/overlap/overlap_policy.h"

// Linears whose communication can go under their products: what the forward and the backward rules share.

namespace weft::fused {

/// A BasicLinear that is split by its output features.
Element column_linear();
/// One that is split by its input features and sums its output itself.
Element row_linear();
/// One that is not split; the collective behind it makes it the part of a row-parallel linear.
Element unsharded_linear();
/// ReduceScatter or AllReduce over more than one rank.
Element cross_rank_reduction();
Element cross_rank_reduce_scatter();

/// A reason if the user, the environment or the device rules overlapping out.
std::string reject_overlap(const Match& match, const PlanView& view);

/// `matrix` [rows, n] with the leading sizes of `like`, of which the first is multiplied by `ranks`, or divided if that
/// is negative.
at::Tensor with_leading_dims(const at::Tensor& matrix, const at::Tensor& like, int ranks);

}  // namespace weft::fused
