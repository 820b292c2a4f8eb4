#pragma once
#include <memory>
#include <string>

#include "weft/comm/transport.h"

namespace weft::comm {

/// A link, or why there is none.
struct TransportLookup {
  std::shared_ptr<Transport> transport;
  std::string reason;
};

/// The link between the ranks of a c10d group, found by its name. Made at first use, by all ranks together, and kept as
/// long as the group lives. Shared memory if all ranks are on one host, else UCX where WEFT_UCX_TRUSTED=1 allows it;
/// WEFT_TRANSPORT=shm|ucx|plain forces. The link and the group's collectives fail together, and the link is for one
/// thread at a time (guarded_transport.h).
TransportLookup get_transport(const std::string& group);

}  // namespace weft::comm
