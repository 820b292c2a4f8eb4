#include <ATen/ops/empty.h>

#include "weft/kernels/row_chunks.h"
#include "weft/kernels/rows.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {
namespace {

constexpr int64_t kFewRows = 255;  // of all ranks: cut, they would meet the weight twice for little

/// Rows of one product, those for each peer and last this rank's own.
class Scatter {
 public:
  Scatter(comm::Link& link, const at::Tensor& x, const kernels::Matrix& w, const kernels::Epilogue& e)
      : link_(link),
        x_(whole_rows(x)),
        w_(w),
        rows_(x.size(0) / link.size()),
        dtype_(e.out.defined()                        ? e.out.scalar_type()
               : e.dtype == at::ScalarType::Undefined ? x.scalar_type()
                                                      : e.dtype),
        peers_(peers(link)),
        y_(e.out.defined() ? e.out : at::empty({rows_, w.columns()}, x.options().dtype(dtype_))),
        e_(e) {
    e_.out.reset();
  }

  at::Tensor run() {
    const bool few = x_.size(0) <= kFewRows;
    const bool squares = !few && link_.in_place() && dtype_ == at::kBFloat16 &&
                         kernels::supports_blocked_layout(x_.scalar_type(), w_.columns(), w_.rows());
    SumRound round(link_, rows_, w_.columns(), dtype_, squares);
    few ? together(round) : in_turn(round);
    round.finish();
    return y_;
  }

 private:
  /// The product of all blocks, peers' first; their results go to the round, this rank's to y.
  kernels::RowChunks make_chunks(SumRound& round) const {
    kernels::RowChunks out{.rows = x_.size(0)};
    const auto block = [&](int rank) { return x_.narrow(0, rank * rows_, rows_); };
    for (const int peer : peers_)
      out.list.push_back({.a = block(peer), .out = round.outgoing(peer), .row = peer * rows_});
    out.list.push_back({.a = block(link_.rank()), .out = y_, .row = link_.rank() * rows_});
    out.on_done = [&](int chunk, int64_t to) {
      if (chunk + 1 < link_.size()) round.publish(peers_[chunk], to);
    };
    if (!link_.in_place()) out.progress = [&] { round.advance(); };
    return out;
  }

  /// Own rows wait for those of the peers and add them as they are stored.
  void in_turn(SumRound& round) const {
    auto product = make_chunks(round);
    for (const int peer : peers_) product.list.back().addends.push_back(round.incoming(peer));
    product.ready = [&](int chunk, int64_t from) {
      return chunk + 1 == link_.size() ? round.arrived_from_all(peers_, from) : rows_;
    };
    kernels::gemm(product, w_, e_);
  }

  /// All rows meet the weight once, then what the peers have is added.
  void together(SumRound& round) const {
    kernels::gemm(make_chunks(round), w_, e_);
    std::vector<at::Tensor> parts{y_};
    for (const int peer : peers_) {
      round.wait(peer);
      parts.push_back(round.incoming(peer));
    }
    kernels::sum_terms(parts, y_);
  }

  comm::Link& link_;
  at::Tensor x_;
  const kernels::Matrix& w_;
  int64_t rows_;  // of a block
  at::ScalarType dtype_;
  std::vector<int> peers_;
  at::Tensor y_;
  kernels::Epilogue e_;
};

}  // namespace

at::Tensor gemm_reduce_scatter(comm::Link& link, const at::Tensor& x, const kernels::Matrix& w,
                               const kernels::Epilogue& epilogue) {
  return Scatter(link, x, w, epilogue).run();
}

}  // namespace weft::overlap
