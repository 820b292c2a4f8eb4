#pragma once
#include <sys/types.h>

#include <string>

namespace weft::comm {

/// Where a rank runs, as far as sharing memory is concerned.
struct Place {
  std::string boot;       // this start of this host
  std::string pid_space;  // in which process ids are counted
  std::string net_space;  // in which sockets are found
  uid_t uid = 0;
  pid_t pid = 0;

  static Place here();
  /// One word for each field; `parse` raises ValueError on any other text.
  std::string text() const;
  static Place parse(const std::string& text);
};

/// Empty if processes at the two places can share memory, else why not: "another host", …
std::string why_apart(const Place& a, const Place& b);

}  // namespace weft::comm
