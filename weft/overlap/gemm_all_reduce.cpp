#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {

at::Tensor gemm_all_reduce(comm::Link& link, const at::Tensor& x, const kernels::Matrix& w,
                           const kernels::Epilogue& epilogue) {
  const int64_t rows = x.size(0), block = (rows + link.size() - 1) / link.size(), all = block * link.size();
  const auto even = all == rows ? x : at::constant_pad_nd(x, {0, 0, 0, all - rows});
  const auto mine = gemm_reduce_scatter(link, even, w, epilogue);
  auto y = at::empty({all, mine.size(1)}, mine.options());
  const auto place = [&](int rank) { return y.narrow(0, rank * block, block); };
  const auto round = link.all_gather(mine);
  place(link.rank()).copy_(mine);
  for (const int peer : peers(link)) {
    round->wait(peer, block);
    place(peer).copy_(round->incoming(peer));
  }
  round->finish();
  return y.narrow(0, 0, rows);
}

}  // namespace weft::overlap
