#pragma once
#include <cstddef>

namespace weft::comm {

/// Bytes this process can still allocate: the minimum of MemAvailable and what its cgroup limits leave.
size_t free_memory();

}  // namespace weft::comm
