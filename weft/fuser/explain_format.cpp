#include "weft/fuser/explain_format.h"

#include <sstream>

namespace weft::fuser {

std::string format_range(int first, int count) {
  return count == 1 ? std::to_string(first) : std::to_string(first) + ".." + std::to_string(first + count - 1);
}

std::string format_bytes(int64_t bytes) {
  std::ostringstream text;
  text.precision(3);
  if (bytes < 1024)
    text << bytes << " B";
  else if (bytes < (int64_t{1} << 20))
    text << static_cast<double>(bytes) / 1024 << " KiB";
  else if (bytes < (int64_t{1} << 30))
    text << static_cast<double>(bytes) / (1 << 20) << " MiB";
  else
    text << static_cast<double>(bytes) / (1 << 30) << " GiB";
  return text.str();
}

}  // namespace weft::fuser
