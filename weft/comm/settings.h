#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace weft::comm {

/// How many collectives of a group are preceded by an agreement: all, with WEFT_CHECK=first 100.
int64_t checked_collectives();

/// WEFT_TIMEOUT, in seconds, if it is set.
std::optional<std::chrono::milliseconds> timeout_from_env();

/// WEFT_TRANSPORT: "shm", "ucx" or "plain"; empty if it is not set.
std::string transport_from_env();

/// WEFT_UCX_TRUSTED=1: only the hosts of this job reach the network that UCX listens on.
bool ucx_trusted();

}  // namespace weft::comm
