#include <ATen/ops/empty.h>

#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {

OverlappedAllGather::OverlappedAllGather(comm::Transport& transport, const at::Tensor& x)
    : transport_(transport), x_(x), collective_(transport.all_gather(x)) {}

at::Tensor OverlappedAllGather::wait() {
  const int64_t rows = x_.size(0);
  auto all = at::empty({rows * transport_.size(), x_.size(1)}, x_.options());
  const auto rows_of = [&](int rank) { return all.narrow(0, rank * rows, rows); };
  rows_of(transport_.rank()).copy_(x_);
  for (const int peer : peers(transport_)) {
    collective_->wait(peer, rows);
    rows_of(peer).copy_(collective_->incoming(peer));
  }
  collective_->finish();
  return all;
}

}  // namespace weft::overlap
