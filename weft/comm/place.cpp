#include "weft/comm/place.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

namespace weft::comm {
namespace {

constexpr const char* kUnknown = "unknown";  // equal to nothing, not even to itself

std::string first_word(const char* path) {
  std::string word;
  std::ifstream(path) >> word;
  return word.empty() ? kUnknown : word;
}

std::string target(const char* link) {
  std::error_code none;
  const auto path = std::filesystem::read_symlink(link, none);
  return none ? kUnknown : path.string();  // "pid:[4026531836]"
}

bool same(const std::string& a, const std::string& b) { return a == b && a != kUnknown; }

}  // namespace

Place Place::here() {
  return {first_word("/proc/sys/kernel/random/boot_id"), target("/proc/self/ns/pid"), target("/proc/self/ns/net"),
          ::getuid(), ::getpid()};
}

std::string Place::text() const { return c10::str(boot, " ", pid_space, " ", net_space, " ", uid, " ", pid); }

Place Place::parse(const std::string& text) {
  Place place;
  std::istringstream in(text);
  in >> place.boot >> place.pid_space >> place.net_space >> place.uid >> place.pid;
  TORCH_CHECK_VALUE(!in.fail() && (in >> std::ws).eof() && place.pid > 0, "'", text, "' is not the place of a rank.");
  return place;
}

std::string why_apart(const Place& a, const Place& b) {
  if (a.boot == kUnknown || b.boot == kUnknown) return "another host (a boot id is unknown)";
  if (a.boot != b.boot) return "another host";
  if (a.uid != b.uid) return c10::str("another user (", a.uid, " and ", b.uid, ")");
  if (!same(a.pid_space, b.pid_space)) return "another process id namespace";
  if (!same(a.net_space, b.net_space)) return "another network namespace";
  return "";
}

}  // namespace weft::comm
