#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {

OverlappedAllGather::OverlappedAllGather(comm::Transport& transport, const at::Tensor& x)
    : transport_(transport), x_(x), collective_(transport.all_gather(x)) {}

at::Tensor OverlappedAllGather::wait() {
  auto all = concatenate_blocks(transport_, *collective_, x_);
  collective_->finish();
  return all;
}

}  // namespace weft::overlap
