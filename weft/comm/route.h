#pragma once
#include <string>
#include <utility>
#include <vector>

namespace weft::comm {

enum class Transport { shm, ucx, plain };

/// What every rank says of itself before a link is made: where it is, what WEFT_TRANSPORT asks for, why it may not use
/// UCX.
using Introductions = std::vector<std::string>;
std::string own_introduction();

/// How the ranks that said this are linked, and why not, if they are not. All come to the same result. Raises DistError
/// if the transport that was asked for cannot link them, or if they asked for different ones.
std::pair<Transport, std::string> choose(const Introductions& by_rank);

/// Once UCX was chosen and loaded: the same, with why each rank could not load it (empty: it could).
std::pair<Transport, std::string> choose_loaded(const Introductions& by_rank, const std::vector<std::string>& why_not);

}  // namespace weft::comm
