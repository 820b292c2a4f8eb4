#pragma once
#include <chrono>
#include <cstdio>
#include <string>

namespace weft::overlap {

/// Seconds on a monotonic clock.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::string format_ms(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f ms", 1e3 * seconds);
  return text;
}

}  // namespace weft::overlap
