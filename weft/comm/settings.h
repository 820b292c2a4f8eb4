#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace weft::comm {

/// How many collectives of a group are preceded by an agreement: 100, with WEFT_CHECK=always all.
int64_t checked_collectives();

/// WEFT_TIMEOUT, in seconds, if it is set.
std::optional<std::chrono::milliseconds> given_timeout();

/// WEFT_TRANSPORT: "shm", "ucx" or "plain"; empty if it is not set.
std::string given_transport();

}  // namespace weft::comm
