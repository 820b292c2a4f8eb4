#include <ATen/ops/empty.h>

#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {

GatherUnder::GatherUnder(comm::Link& link, const at::Tensor& x) : link_(link), x_(x), round_(link.all_gather(x)) {}

at::Tensor GatherUnder::wait() {
  const int64_t rows = x_.size(0);
  auto all = at::empty({rows * link_.size(), x_.size(1)}, x_.options());
  const auto place = [&](int rank) { return all.narrow(0, rank * rows, rows); };
  place(link_.rank()).copy_(x_);
  for (const int peer : peers(link_)) {
    round_->wait(peer, rows);
    place(peer).copy_(round_->incoming(peer));
  }
  round_->finish();
  return all;
}

}  // namespace weft::overlap
