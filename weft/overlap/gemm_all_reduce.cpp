#include <ATen/ops/constant_pad_nd.h>

#include "weft/overlap/schedules.h"

namespace weft::overlap {

at::Tensor gemm_all_reduce(comm::Link& link, const at::Tensor& x, const kernels::Matrix& w,
                           const kernels::Epilogue& epilogue) {
  const int64_t rows = x.size(0), block = (rows + link.size() - 1) / link.size(), all = block * link.size();
  const auto even = all == rows ? x : at::constant_pad_nd(x, {0, 0, 0, all - rows});
  const auto mine = gemm_reduce_scatter(link, even, w, epilogue);
  return GatherUnder(link, mine).wait().narrow(0, 0, rows);
}

}  // namespace weft::overlap
