#pragma once
#include <functional>
#include <string>
#include <vector>

#include "weft/comm/ucx/wire.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::comm::ucx {

/// What the ranks of a group tell each other through its Store.
struct PeerAddresses {
  std::vector<std::string> addresses;  // of each rank
  Token token{};                       // each rank gives a random part of it
  std::string key;                     // of this rank's record
};

/// Shows this rank's address and waits for the others'. Raises at the timeout, naming who is missing; if `address`
/// raises, every rank does. Ranks that do this again must all do so.
PeerAddresses exchange_addresses(const UcxOptions& options, const std::function<std::string()>& address);

/// Takes this rank's record away when everybody has read it.
void remove_record(const UcxOptions& options, const PeerAddresses& peer_addresses);

}  // namespace weft::comm::ucx
