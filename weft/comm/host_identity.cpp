#include "weft/comm/host_identity.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

namespace weft::comm {
namespace {

constexpr const char* kUnknown = "unknown";  // never equal, not even to itself

std::string first_token(const char* path) {
  std::string token;
  std::ifstream(path) >> token;
  return token.empty() ? kUnknown : token;
}

std::string symlink_target(const char* link) {
  std::error_code error;
  const auto path = std::filesystem::read_symlink(link, error);
  return error ? kUnknown : path.string();  // e.g. "pid:[4026531836]"
}

bool same(const std::string& a, const std::string& b) { return a == b && a != kUnknown; }

}  // namespace

HostIdentity HostIdentity::local() {
  return {first_token("/proc/sys/kernel/random/boot_id"), symlink_target("/proc/self/ns/pid"),
          symlink_target("/proc/self/ns/net"), ::getuid(), ::getpid()};
}

std::string HostIdentity::text() const {
  return c10::str(boot_id, " ", pid_namespace, " ", net_namespace, " ", uid, " ", pid);
}

HostIdentity HostIdentity::parse(const std::string& text) {
  HostIdentity host;
  std::istringstream in(text);
  in >> host.boot_id >> host.pid_namespace >> host.net_namespace >> host.uid >> host.pid;
  TORCH_CHECK_VALUE(!in.fail() && (in >> std::ws).eof() && host.pid > 0, "'", text, "' is not a host identity.");
  return host;
}

std::string not_colocated_reason(const HostIdentity& a, const HostIdentity& b) {
  if (a.boot_id == kUnknown || b.boot_id == kUnknown) return "different host (a boot id is unknown)";
  if (a.boot_id != b.boot_id) return "different host";
  if (a.uid != b.uid) return c10::str("different user (", a.uid, " and ", b.uid, ")");
  if (!same(a.pid_namespace, b.pid_namespace)) return "different PID namespace";
  if (!same(a.net_namespace, b.net_namespace)) return "different network namespace";
  return "";
}

}  // namespace weft::comm
