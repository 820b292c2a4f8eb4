#include <ATen/ops/empty.h>

#include "weft/kernels/pieces.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {

kernels::GemmResult all_gather_gemm(comm::Link& link, const at::Tensor& given, const kernels::Matrix& w,
                                    const kernels::Epilogue& epilogue, at::Tensor* gathered) {
  const auto x = whole_rows(given);
  const int64_t rows = x.size(0);
  const auto round = link.all_gather(x);
  std::vector<int> owner{link.rank()};
  for (const int peer : peers(link)) owner.push_back(peer);
  kernels::Pieces pieces{.rows = rows * link.size()};
  for (const int rank : owner)
    pieces.list.push_back({.a = rank == link.rank() ? x : round->incoming(rank), .row = rank * rows});
  pieces.ready = [&](int piece, int64_t from) {
    return piece == 0 ? rows : arrived_from_all(*round, {owner[piece]}, from, rows);
  };
  if (link.in_place())
    pieces.least = pieces.rows;  // they come soon: better to wait than to read the weight once more
  else
    pieces.between = [&] { round->advance(); };
  auto result = kernels::gemm(pieces, w, epilogue);
  if (gathered) {
    *gathered = at::empty({pieces.rows, x.size(1)}, x.options());
    for (const auto& piece : pieces.list) gathered->narrow(0, piece.row, rows).copy_(piece.a);
  }
  round->finish();
  return result;
}

}  // namespace weft::overlap
