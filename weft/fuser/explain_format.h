#pragma once
#include <cstdint>
#include <string>

namespace weft::fuser {

/// "3" or "3..5"
std::string format_range(int first, int count);
/// "12 B", "1.5 KiB"
std::string format_bytes(int64_t bytes);

}  // namespace weft::fuser
