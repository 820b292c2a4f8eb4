#pragma once
#include <cstdint>
#include <string>

#include "weft/fused/rule.h"

namespace weft::fuser {

/// "3" or "3..5"
std::string range(int first, int count);
/// "12 B", "1.5 KiB"
std::string human(int64_t bytes);
const char* pass_name(fused::Pass pass);

}  // namespace weft::fuser
