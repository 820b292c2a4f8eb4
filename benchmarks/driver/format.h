#pragma once
#include <string>

namespace bench {

/// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

}  // namespace bench
