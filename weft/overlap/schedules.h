#pragma once
#include <functional>
#include <memory>

#include "weft/comm/transport.h"
#include "weft/kernels/gemm.h"
#include "weft/kernels/quantized_gemm.h"

// Schedules that overlap a collective with a GEMM [S, K] x [K, N]. p ranks; S rows in total; rank r owns block r.
// Every rank of the transport calls the same function with the same sizes. Sums over ranks accumulate in float32
// (float64 for float64) and round once; their blocks are sent in the dtype of the GEMM result.

namespace weft::overlap {

/// Y = epilogue(all_gather(X) W).
///   p steps;  receives (p-1)/p of X;  hidden if the GEMM of a block takes at least as long as its transfer
/// Own rows first, then those of rank + 1, rank + 2, …, as they arrive; with zero-copy, the GEMM reads them in the
/// memory of the peer. `gathered`, if not null, receives the gathered X, for a later GEMM.
kernels::GemmResult all_gather_gemm(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                                    const kernels::Epilogue& epilogue, at::Tensor* gathered = nullptr);

/// A rank's rows of a quantized X as they are sent: a header, and the rowwise copy.
struct QuantizedBlock {
  at::Tensor bytes;  // uint8 [header + copy]
  int64_t header_bytes;
  kernels::QuantizedMatrix rows;  // this rank's
};

/// Y = epilogue(all_gather(X) Wᵀ) for a quantized X, as `all_gather_gemm`. Scales arrive before codes, and rows are
/// decoded as they arrive. `check` is called for each peer before its rows are decoded, with its header and rows, and
/// raises if they do not fit; the error is raised after the collective, which is complete on all ranks. Takes
/// quantizations that `multiplies_in_chunks`.
kernels::GemmResult all_gather_gemm(
    comm::Transport& transport, const QuantizedBlock& x, const kernels::QuantizedOperand& w,
    const kernels::Epilogue& epilogue,
    const std::function<void(int rank, const at::Tensor& header, const kernels::QuantizedMatrix& rows)>& check);

/// Y_r = Σ_ranks epilogue(X W)_r: each rank applies `epilogue` (scale and bias) to its own term.
///   p steps;  sends and receives (p-1)/p of Y;  hidden if the GEMM of own rows takes at least as long as the last
///   transfer
/// The peers' rows first, marked ready as they are computed; own rows last, with the peers' blocks added on store.
at::Tensor gemm_reduce_scatter(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                               const kernels::Epilogue& epilogue);

/// Y = Σ_ranks X W on every rank, for any number of rows: gemm_reduce_scatter of ⌈S/p⌉-row blocks, then an all-gather.
///   receives 2 (p-1)/p of Y;  the all-gather is not hidden
at::Tensor gemm_all_reduce(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                           const kernels::Epilogue& epilogue);

/// all_gather(X), overlapped with a GEMM that does not need it and that calls `progress`.
///   receives (p-1)/p of X;  hidden if that GEMM takes at least as long as the transfers
class OverlappedAllGather {
 public:
  OverlappedAllGather(comm::Transport& transport, const at::Tensor& x);
  void progress() { collective_->progress(); }
  at::Tensor wait();

 private:
  comm::Transport& transport_;
  at::Tensor x_;
  std::unique_ptr<comm::InFlightCollective> collective_;
};

/// DX_r = Σ_ranks (DY W)_r, whose last transfers overlap with a second GEMM that does not need it.
///   sends and receives (p-1)/p of DX;  hidden if the GEMM of own rows and the second GEMM together take at least as
///   long as the last transfer
/// The constructor runs the GEMM DY W and calls `on_progress` during it.
class OverlappedReduceScatter {
 public:
  OverlappedReduceScatter(comm::Transport& transport, const at::Tensor& dy, const kernels::Matrix& w,
                          const kernels::Epilogue& epilogue, const std::function<void()>& on_progress);
  /// Does not raise, so that the GEMM that calls it completes; `wait` raises the error.
  void progress() noexcept;
  at::Tensor wait();

 private:
  comm::Transport& transport_;
  std::unique_ptr<comm::InFlightCollective> collective_;
  at::Tensor local_;  // this rank's term, in float32 (float64 for float64)
  at::ScalarType dtype_;
};

}  // namespace weft::overlap
