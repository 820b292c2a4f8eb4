#include <ATen/ops/constant_pad_nd.h>

#include "weft/overlap/schedules.h"

namespace weft::overlap {

at::Tensor gemm_all_reduce(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                           const kernels::Epilogue& epilogue) {
  const int64_t rows = x.size(0), block = (rows + transport.size() - 1) / transport.size(),
                all = block * transport.size();
  const auto padded = all == rows ? x : at::constant_pad_nd(x, {0, 0, 0, all - rows});
  const auto local = gemm_reduce_scatter(transport, padded, w, epilogue);
  return OverlappedAllGather(transport, local).wait().narrow(0, 0, rows);
}

}  // namespace weft::overlap
