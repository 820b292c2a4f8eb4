#include <ATen/ops/empty.h>

#include "weft/kernels/pieces.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {
namespace {

/// This rank's rows in tiles, in memory that its peers read: none of them has to copy or pack.
at::Tensor packed(comm::Link& link, const at::Tensor& x, int64_t n) {
  const int64_t rows = (x.size(0) + 31) / 32, columns = (x.size(1) + 31) / 32 * 32 * 32;
  if (!link.in_place() || !kernels::in_squares(x.scalar_type(), n, x.size(1))) return {};
  auto block = link.place(rows, columns, x.scalar_type());
  if (block.defined()) kernels::pack_rows(x, block.view({rows, columns / 512, 16, 32}));
  return block;
}

at::Tensor joined(const comm::Link& link, comm::Exchange& round, const at::Tensor& x) {
  const int64_t rows = x.size(0);
  auto all = at::empty({rows * link.size(), x.size(1)}, x.options());
  for (int rank = 0; rank < link.size(); ++rank)
    all.narrow(0, rank * rows, rows).copy_(rank == link.rank() ? x : round.incoming(rank));
  return all;
}

}  // namespace

kernels::GemmResult all_gather_gemm(comm::Link& link, const at::Tensor& given, const kernels::Matrix& w,
                                    const kernels::Epilogue& epilogue, at::Tensor* gathered) {
  const auto x = whole_rows(given);
  const int64_t rows = x.size(0);
  const auto tiles = gathered ? at::Tensor() : packed(link, x, w.columns());
  const auto round = link.all_gather(tiles.defined() ? tiles : x);
  std::vector<int> owner{link.rank()};
  for (const int peer : peers(link)) owner.push_back(peer);
  kernels::Pieces pieces{.rows = rows * link.size()};
  for (const int rank : owner) {
    const auto block = rank != link.rank() ? round->incoming(rank) : tiles.defined() ? tiles : x;
    if (tiles.defined())
      pieces.list.push_back({.a = block.view({block.size(0), -1, 16, 32}), .row = rank * rows, .packed_rows = rows});
    else
      pieces.list.push_back({.a = block, .row = rank * rows});
  }
  pieces.ready = [&](int piece, int64_t from) {
    if (piece == 0) return rows;
    if (!tiles.defined()) return arrived_from_all(*round, {owner[piece]}, from, rows);
    return std::min(rows, 32 * arrived_from_all(*round, {owner[piece]}, from / 32, tiles.size(0)));
  };
  if (link.in_place())
    pieces.least = pieces.rows;  // they come soon: better to wait than to read the weight once more
  else
    pieces.between = [&] { round->advance(); };
  auto result = kernels::gemm(pieces, w, epilogue);
  if (gathered) *gathered = joined(link, *round, x);
  round->finish();
  return result;
}

}  // namespace weft::overlap
