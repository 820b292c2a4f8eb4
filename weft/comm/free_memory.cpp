#include "weft/comm/free_memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace weft::comm {
namespace {

namespace fs = std::filesystem;

constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

/// Reads a file that holds one number; kNoLimit if it is missing or holds a word ("max").
size_t read_number(const fs::path& path) {
  size_t value = 0;
  return std::ifstream(path) >> value ? value : kNoLimit;
}

/// Sums two fields of a file of "name value" lines.
size_t sum_fields(const fs::path& path, std::string_view first, std::string_view second) {
  std::ifstream file(path);
  std::string field;
  size_t value = 0, sum = 0;
  while (file >> field >> value)
    if (field == first || field == second) sum += value;
  return sum;
}

/// limit - (use - page cache) of one cgroup: the kernel can reclaim the page cache.
size_t cgroup_available(const fs::path& group, const char* limit, const char* use) {
  const size_t limit_bytes = read_number(group / limit), used = read_number(group / use);
  if (limit_bytes == kNoLimit || used == kNoLimit) return kNoLimit;
  const size_t files = sum_fields(group / "memory.stat", "inactive_file", "active_file");
  const size_t fixed = used - std::min(used, files);
  return limit_bytes - std::min(limit_bytes, fixed);
}

/// The minimum over this process's cgroup and its ancestors.
size_t min_cgroup_available() {
  std::ifstream file("/proc/self/cgroup");
  size_t least = kNoLimit;
  for (std::string line; std::getline(file, line);) {  // cgroup v1: "4:memory:/path"; v2: "0::/path"
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && controllers != "memory") continue;
    const fs::path root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    for (fs::path path = line.substr(second + 1); !path.empty(); path = path.parent_path()) {
      const fs::path group = root / path.relative_path();
      least = std::min(least, unified ? cgroup_available(group, "memory.max", "memory.current")
                                      : cgroup_available(group, "memory.limit_in_bytes", "memory.usage_in_bytes"));
      if (!path.has_relative_path()) break;
    }
  }
  return least;
}

/// MemAvailable: the kernel's estimate of what can be allocated without swapping.
size_t system_available() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("MemAvailable:")) return std::stoull(line.substr(13)) * 1024;
  return kNoLimit;
}

}  // namespace

size_t free_memory() { return std::min(system_available(), min_cgroup_available()); }

}  // namespace weft::comm
