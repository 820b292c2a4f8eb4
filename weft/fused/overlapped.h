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

/// The ranks that a matched linear communicates with: its own group, or that of the collective after it.
struct LinearGroup {
  std::string name;
  int size = 1;
  bool scatters = false;        // reduces by reduce-scatter, otherwise by all-reduce
  std::optional<bool> overlap;  // as requested by the user

  explicit LinearGroup(const Match& match);
};

/// One call of a linear: decides whether it overlaps, and reports the decision and the time of the call at its end.
class OverlappedCall {
 public:
  OverlappedCall(StepContext& ctx, const LinearGroup& group);
  ~OverlappedCall();
  OverlappedCall(const OverlappedCall&) = delete;
  OverlappedCall& operator=(const OverlappedCall&) = delete;

  /// The transport for the all-gather of a rank's rows [rows, k], overlapped with their GEMM with [k, n]; null: use
  /// plain collectives. Does not depend on the recipe: ranks with different recipes must meet in the same collective,
  /// which detects the mismatch.
  comm::Transport* all_gather(at::ScalarType dtype, int64_t rows, int64_t n, int64_t k);
  /// The transport for the reduction of the GEMM of `rows` with [k, n].
  comm::Transport* reduction(const at::Tensor& rows, int64_t n, int64_t k);

 private:
  comm::Transport* decide(const overlap::OverlapShape& shape);

  StepContext& ctx_;
  const LinearGroup& group_;
  double start_;
  std::optional<overlap::OverlapDecision> decision_;
};

/// `matrix` [rows, n] reshaped to the leading sizes of `like`, with the first one multiplied by `ranks`, or divided by
/// -ranks if negative.
at::Tensor with_leading_dims(const at::Tensor& matrix, const at::Tensor& like, int ranks);

}  // namespace weft::fused
