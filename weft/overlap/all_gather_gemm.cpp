#include <ATen/ops/empty.h>

#include "weft/kernels/row_chunks.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {
namespace {

class Gather {
 public:
  Gather(comm::Link& link, const at::Tensor& x, const kernels::Matrix& w, const kernels::Epilogue& e)
      : link_(link), x_(whole_rows(x)), w_(w), e_(e), rows_(x.size(0)) {
    owner_ = peers(link);
    owner_.insert(owner_.begin(), link.rank());
  }

  kernels::GemmResult run(at::Tensor* gathered) {
    if (!gathered && rows_ > 0 && link_.in_place() && kernels::supports_blocked_layout(x_.scalar_type(), w_.columns(), w_.rows())) {
      const auto columns = columns_for(c10::multiply_integers(tiles()), rows_, x_.size(1));
      if (const auto round = link_.all_gather(rows_, columns, x_.scalar_type())) return in_tiles(*round);
    }
    const auto round = link_.all_gather(x_);
    auto result = in_rows(*round);
    if (gathered) *gathered = joined(*round);
    round->finish();
    return result;
  }

 private:
  /// Sizes of a block in tiles (kernels/row_chunks.h).
  std::vector<int64_t> tiles() const { return {(rows_ + 31) / 32, (x_.size(1) + 31) / 32 * 2, 16, 32}; }

  kernels::GemmResult in_rows(comm::Exchange& round) const {
    kernels::RowChunks chunks{.rows = rows_ * link_.size()};
    for (const int rank : owner_)
      chunks.list.push_back({.a = rank == link_.rank() ? x_ : round.incoming(rank), .row = rank * rows_});
    chunks.ready = [&](int chunk, int64_t from) {
      return chunk == 0 ? rows_ : arrived_from_all(round, {owner_[chunk]}, from, rows_);
    };
    if (link_.in_place())
      chunks.min_block_rows = chunks.rows;  // they come soon: better to wait than to read the weight once more
    else
      chunks.progress = [&] { round.advance(); };
    return kernels::gemm(chunks, w_, e_);
  }

  /// Own rows are packed into tiles for the product as ever, and on the way into memory that the peers read: nobody
  /// copies them, or packs them once more.
  kernels::GemmResult in_tiles(comm::Exchange& round) const {
    kernels::RowChunks chunks{.rows = rows_ * link_.size(), .min_block_rows = rows_ * link_.size()};
    const int me = link_.rank();
    chunks.list.push_back({.a = x_, .row = me * rows_, .pack_dst = reshaped(round.outgoing(me), tiles())});
    for (size_t i = 1; i < owner_.size(); ++i)
      chunks.list.push_back(
          {.a = reshaped(round.incoming(owner_[i]), tiles()), .row = owner_[i] * rows_, .packed_rows = rows_});
    chunks.on_packed = [&](int, int64_t to) { round.publish(me, std::min(to, rows_)); };
    chunks.ready = [&](int chunk, int64_t from) {
      return chunk == 0 ? rows_ : arrived_from_all(round, {owner_[chunk]}, from, rows_);
    };
    auto result = kernels::gemm(chunks, w_, e_);
    round.finish();
    return result;
  }

  at::Tensor joined(comm::Exchange& round) const {
    auto all = at::empty({rows_ * link_.size(), x_.size(1)}, x_.options());
    for (int rank = 0; rank < link_.size(); ++rank)
      all.narrow(0, rank * rows_, rows_).copy_(rank == link_.rank() ? x_ : round.incoming(rank));
    return all;
  }

  comm::Link& link_;
  at::Tensor x_;
  const kernels::Matrix& w_;
  const kernels::Epilogue& e_;
  int64_t rows_;            // of a block
  std::vector<int> owner_;  // of each piece
};

}  // namespace

kernels::GemmResult all_gather_gemm(comm::Link& link, const at::Tensor& x, const kernels::Matrix& w,
                                    const kernels::Epilogue& epilogue, at::Tensor* gathered) {
  return Gather(link, x, w, epilogue).run(gathered);
}

}  // namespace weft::overlap
