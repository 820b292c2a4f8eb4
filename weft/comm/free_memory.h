#pragma once
#include <cstddef>

namespace weft::comm {

/// Bytes that this process can still take, by the kernel's estimate and the limits of its control groups.
size_t free_memory();

}  // namespace weft::comm
