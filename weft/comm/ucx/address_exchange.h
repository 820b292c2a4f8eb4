#pragma once
#include <functional>
#include <string>
#include <vector>

#include "weft/comm/ucx/wire.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::comm::ucx {

/// Result of the address exchange through the Store of a group.
struct PeerAddresses {
  std::vector<std::string> addresses;  // UCX worker addresses, by rank
  Token token{};                       // XOR of a random number from each rank
  std::string key;                     // Store key of this rank's record
};

/// Writes this rank's address to the Store and waits for the others. A collective call. Raises at the timeout, naming
/// the missing rank; if `address` raises on one rank, every rank raises.
PeerAddresses exchange_addresses(const UcxOptions& options, const std::function<std::string()>& address);

/// Deletes this rank's record. Call it after every rank has read it.
void remove_record(const UcxOptions& options, const PeerAddresses& peer_addresses);

}  // namespace weft::comm::ucx
