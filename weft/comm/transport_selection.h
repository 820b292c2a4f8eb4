#pragma once
#include <string>
#include <utility>
#include <vector>

namespace weft::comm {

enum class TransportKind { shm, ucx, plain };

/// What each rank tells the others before a transport is created: its host, its WEFT_TRANSPORT, and why it cannot use
/// UCX (empty: it can).
using PeerInfoTexts = std::vector<std::string>;
std::string local_peer_info();

/// The transport of ranks with these peer infos; for `plain`, also the reason. Every rank computes the same result.
/// Raises DistError if the requested transport cannot be used, or if ranks request different ones.
std::pair<TransportKind, std::string> select_transport(const PeerInfoTexts& by_rank);

/// The same, after UCX was selected: `load_errors` says for each rank why it could not load UCX (empty: it could).
std::pair<TransportKind, std::string> select_loaded_transport(const PeerInfoTexts& by_rank,
                                                              const std::vector<std::string>& load_errors);

}  // namespace weft::comm
