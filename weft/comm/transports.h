#pragma once
#include <memory>
#include <string>

#include "weft/comm/transport.h"

namespace weft::comm {

/// A transport, or the reason why the group has none.
struct TransportLookup {
  std::shared_ptr<Transport> transport;
  std::string reason;
};

/// The transport of a registered c10d group. The first call creates it and is a collective call; it lives as long as
/// the group. Shared memory if all ranks are on one host, otherwise UCX if WEFT_UCX_TRUSTED=1;
/// WEFT_TRANSPORT=shm|ucx|plain overrides this. The transport shares the failure state of the group's collectives and
/// serves one thread at a time (guarded_transport.h).
TransportLookup get_transport(const std::string& group);

}  // namespace weft::comm
