#pragma once
#include <sys/types.h>

#include <string>

namespace weft::comm {

/// Where a rank runs, as far as sharing memory is concerned.
struct HostIdentity {
  std::string boot_id;        // this start of this host
  std::string pid_namespace;  // in which process ids are counted
  std::string net_namespace;  // in which sockets are found
  uid_t uid = 0;
  pid_t pid = 0;

  static HostIdentity local();
  /// One word for each field; `parse` raises ValueError on any other text.
  std::string text() const;
  static HostIdentity parse(const std::string& text);
};

/// Empty if processes at the two places can share memory, else why not: "another host", …
std::string not_colocated_reason(const HostIdentity& a, const HostIdentity& b);

}  // namespace weft::comm
