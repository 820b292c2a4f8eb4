#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace weft::comm {

/// Number of collectives of a group whose fingerprints are checked: all, or 100 with WEFT_CHECK=first.
int64_t checked_collectives();

/// WEFT_TIMEOUT (seconds), if set.
std::optional<std::chrono::milliseconds> timeout_from_env();

/// WEFT_TRANSPORT: "shm", "ucx" or "plain"; empty if unset.
std::string transport_from_env();

/// WEFT_UCX_TRUSTED=1: the user guarantees that only hosts of this job reach the network UCX listens on.
bool ucx_trusted();

}  // namespace weft::comm
