#pragma once
#include <memory>
#include <string>

#include "weft/comm/exchange.h"

namespace weft::comm {

/// A link, or why there is none.
struct FoundLink {
  std::shared_ptr<Link> link;
  std::string reason;
};

/// The link between the ranks of a c10d group, found by its name. Made at first use, by all ranks together, and kept as
/// long as the group lives. Shared memory if all ranks are on one host, else UCX where WEFT_UCX_TRUSTED=1 allows it;
/// WEFT_TRANSPORT=shm|ucx|plain forces. The link and the group's collectives fail together, and the link is for one
/// thread at a time (guarded_link.h).
FoundLink link_of(const std::string& group);

}  // namespace weft::comm
