#pragma once
#include <string>
#include <utility>
#include <vector>

namespace weft::comm {

enum class TransportKind { shm, ucx, plain };

/// What every rank says of itself before a link is made: where it is, what WEFT_TRANSPORT asks for, why it may not use
/// UCX.
using PeerInfoTexts = std::vector<std::string>;
std::string local_peer_info();

/// How the ranks that said this are linked, and why not, if they are not. All come to the same result. Raises DistError
/// if the transport that was asked for cannot link them, or if they asked for different ones.
std::pair<TransportKind, std::string> select_transport(const PeerInfoTexts& by_rank);

/// Once UCX was chosen and loaded: the same, with why each rank could not load it (empty: it could).
std::pair<TransportKind, std::string> select_loaded_transport(const PeerInfoTexts& by_rank,
                                                              const std::vector<std::string>& load_errors);

}  // namespace weft::comm
