#include "benchmarks/driver/format.h"

#include <cstdarg>
#include <cstdio>

namespace bench {

std::string format(const char* pattern, ...) {
  va_list values;
  va_start(values, pattern);
  va_list copy;
  va_copy(copy, values);
  std::string out(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, values)), ' ');
  std::vsnprintf(out.data(), out.size() + 1, pattern, copy);
  va_end(copy);
  va_end(values);
  return out;
}

}  // namespace bench
