#include <ATen/ops/empty.h>

#include "weft/kernels/row_chunks.h"
#include "weft/kernels/rows.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {
namespace {

constexpr int64_t kMaxSinglePassRows = 255;  // of all ranks: a second pass over the weight would cost more

/// One GEMM whose row chunks are the blocks of the peers, then this rank's own.
class GemmReduceScatter {
 public:
  GemmReduceScatter(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                    const kernels::Epilogue& e)
      : transport_(transport),
        x_(with_contiguous_rows(x)),
        w_(w),
        rows_(x.size(0) / transport.size()),
        dtype_(e.result_dtype(x.scalar_type())),
        peers_(peers(transport)),
        y_(e.out.defined() ? e.out : at::empty({rows_, w.columns()}, x.options().dtype(dtype_))),
        e_(e) {
    e_.out.reset();
  }

  at::Tensor run() {
    const bool single_pass = x_.size(0) <= kMaxSinglePassRows;
    const bool blocked = !single_pass && transport_.zero_copy() && dtype_ == at::kBFloat16 &&
                         kernels::supports_blocked_layout(x_.scalar_type(), w_.columns(), w_.rows());
    BlockedReduceScatter collective(transport_, rows_, w_.columns(), dtype_, blocked);
    single_pass ? run_single_pass(collective) : run_pipelined(collective);
    collective.finish();
    return y_;
  }

 private:
  /// Own rows are computed last: their epilogue adds the blocks of the peers as they arrive.
  void run_pipelined(BlockedReduceScatter& collective) const {
    auto chunks = reduce_scatter_chunks(transport_, collective, x_, y_);
    for (const int peer : peers_) chunks.list.back().addends.push_back(collective.incoming(peer));
    chunks.ready = [&](int chunk, int64_t from) {
      return chunk + 1 == transport_.size() ? collective.arrived_from_all(peers_, from) : rows_;
    };
    kernels::gemm(chunks, w_, e_);
  }

  /// One pass of all rows over the weight, then adds the blocks of the peers.
  void run_single_pass(BlockedReduceScatter& collective) const {
    kernels::gemm(reduce_scatter_chunks(transport_, collective, x_, y_), w_, e_);
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
