#pragma once
#include <sys/types.h>

#include <string>

namespace weft::comm {

/// Where a rank runs. Decides whether two ranks can share memory.
struct HostIdentity {
  std::string boot_id;  // identifies the host and its current boot
  std::string pid_namespace;
  std::string net_namespace;
  uid_t uid = 0;
  pid_t pid = 0;

  static HostIdentity local();
  /// The five fields, separated by spaces. `parse` raises ValueError on any other text.
  std::string text() const;
  static HostIdentity parse(const std::string& text);
};

/// Empty if processes with these identities can share memory, otherwise the reason: "different host", …
std::string not_colocated_reason(const HostIdentity& a, const HostIdentity& b);

}  // namespace weft::comm
