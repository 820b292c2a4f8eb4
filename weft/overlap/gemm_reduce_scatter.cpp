#include <ATen/ops/empty.h>

#include "weft/kernels/row_chunks.h"
#include "weft/kernels/rows.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {
namespace {

constexpr int64_t kFewRows = 255;  // rows of all ranks; below, a second pass over the weight costs more than it hides

/// One GEMM whose row chunks are the blocks of the peers, then this rank's own.
class GemmReduceScatter {
 public:
  GemmReduceScatter(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                    const kernels::Epilogue& e)
      : transport_(transport),
        x_(with_contiguous_rows(x)),
        w_(w),
        rows_(x.size(0) / transport.size()),
        dtype_(e.out.defined()                        ? e.out.scalar_type()
               : e.dtype == at::ScalarType::Undefined ? x.scalar_type()
                                                      : e.dtype),
        peers_(peers(transport)),
        y_(e.out.defined() ? e.out : at::empty({rows_, w.columns()}, x.options().dtype(dtype_))),
        e_(e) {
    e_.out.reset();
  }

  at::Tensor run() {
    const bool few = x_.size(0) <= kFewRows;
    const bool blocked = !few && transport_.zero_copy() && dtype_ == at::kBFloat16 &&
                         kernels::supports_blocked_layout(x_.scalar_type(), w_.columns(), w_.rows());
    BlockedReduceScatter collective(transport_, rows_, w_.columns(), dtype_, blocked);
    few ? run_single_pass(collective) : run_pipelined(collective);
    collective.finish();
    return y_;
  }

 private:
  /// Row chunks of all blocks, peers first. Blocks of peers are written to the collective, this rank's to y.
  kernels::RowChunks make_chunks(BlockedReduceScatter& collective) const {
    kernels::RowChunks out{.rows = x_.size(0)};
    const auto block = [&](int rank) { return x_.narrow(0, rank * rows_, rows_); };
    for (const int peer : peers_)
      out.list.push_back({.a = block(peer), .out = collective.outgoing(peer), .row = peer * rows_});
    out.list.push_back({.a = block(transport_.rank()), .out = y_, .row = transport_.rank() * rows_});
    out.on_done = [&](int chunk, int64_t to) {
      if (chunk + 1 < transport_.size()) collective.mark_ready(peers_[chunk], to);
    };
    if (!transport_.zero_copy()) out.progress = [&] { collective.progress(); };
    return out;
  }

  /// Own rows are computed last: their epilogue adds the blocks of the peers as they arrive.
  void run_pipelined(BlockedReduceScatter& collective) const {
    auto chunks = make_chunks(collective);
    for (const int peer : peers_) chunks.list.back().addends.push_back(collective.incoming(peer));
    chunks.ready = [&](int chunk, int64_t from) {
      return chunk + 1 == transport_.size() ? collective.arrived_from_all(peers_, from) : rows_;
    };
    kernels::gemm(chunks, w_, e_);
  }

  /// One pass of all rows over the weight, then adds the blocks of the peers.
  void run_single_pass(BlockedReduceScatter& collective) const {
    kernels::gemm(make_chunks(collective), w_, e_);
    std::vector<at::Tensor> parts{y_};
    for (const int peer : peers_) {
      collective.wait(peer);
      parts.push_back(collective.incoming(peer));
    }
    kernels::sum_terms(parts, y_);
  }

  comm::Transport& transport_;
  at::Tensor x_;
  const kernels::Matrix& w_;
  int64_t rows_;  // of a block
  at::ScalarType dtype_;
  std::vector<int> peers_;
  at::Tensor y_;
  kernels::Epilogue e_;
};

}  // namespace

at::Tensor gemm_reduce_scatter(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                               const kernels::Epilogue& epilogue) {
  return GemmReduceScatter(transport, x, w, epilogue).run();
}

}  // namespace weft::overlap
