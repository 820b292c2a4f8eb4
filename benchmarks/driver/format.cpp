#include "benchmarks/driver/format.h"

#include <cstdarg>
#include <cstdio>

namespace bench {

std::string format(const char* form, ...) {
  va_list values;
  va_start(values, form);
  va_list again;
  va_copy(again, values);
  std::string out(static_cast<size_t>(std::vsnprintf(nullptr, 0, form, values)), ' ');
  std::vsnprintf(out.data(), out.size() + 1, form, again);
  va_end(again);
  va_end(values);
  return out;
}

}  // namespace bench
