#pragma once
#include <functional>
#include <memory>

#include "weft/comm/transport.h"
#include "weft/kernels/gemm.h"

// In what order pieces of a product and blocks between ranks go. p ranks; S rows over all ranks, rank r owning block r;
// matrices [rows, K] times a weight [K, N]. Every rank of the link calls the same function with the same sizes.
// Sums over ranks are taken in float32 (float64 of float64) and rounded once; what travels has the product's dtype.

namespace weft::overlap {

/// Y = epilogue(all_gather(X) W).
///   steps p;  received (p-1)/p of X;  hidden when the product of a block takes as long as a block on its way
/// Own rows first, then the others' in the order of ranks, as many as are there; read where they lie if the link can.
/// `gathered`: gets X of all ranks if not null, for a product that needs them once more.
kernels::GemmResult all_gather_gemm(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                                    const kernels::Epilogue& epilogue, at::Tensor* gathered = nullptr);

/// Y_r = Σ_ranks (X W)_r, with what `epilogue` does (scale and bias) done to each rank's part.
///   steps p;  sent and received (p-1)/p of Y;  hidden when own rows take as long as the last block on its way
/// The peers' rows first, published as they are finished; own rows last, the peers' parts added as they are stored.
at::Tensor gemm_reduce_scatter(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                               const kernels::Epilogue& epilogue);

/// Y = Σ_ranks X W on every rank, any number of rows: the above by blocks of ⌈S/p⌉ rows, then a gather of the results.
///   received 2 (p-1)/p of Y, of which the second half is not hidden
at::Tensor gemm_all_reduce(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                           const kernels::Epilogue& epilogue);

/// X of all ranks, gathered under a product that does not need it: `progress` is called by that product.
///   received (p-1)/p of X;  hidden when the product takes as long
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

/// DX_r = Σ_ranks (DY W)_r, whose last part goes under a product that does not need it.
///   sent and received (p-1)/p of DX;  hidden when own rows and the other product take as long
/// The constructor multiplies; `on_progress` is called meanwhile.
class OverlappedReduceScatter {
 public:
  OverlappedReduceScatter(comm::Transport& transport, const at::Tensor& dy, const kernels::Matrix& w,
                          const kernels::Epilogue& epilogue, const std::function<void()>& on_progress);
  /// Never raises, so that the product it is called from is whole: what went wrong is raised by `wait`.
  void progress() noexcept;
  at::Tensor wait();

 private:
  comm::Transport& transport_;
  std::unique_ptr<comm::InFlightCollective> collective_;
  at::Tensor local_;  // in float32
  at::ScalarType dtype_;
};

}  // namespace weft::overlap
