#pragma once
#include <sys/types.h>

#include "weft/comm/unique_fd.h"

namespace weft::comm {

/// Another process, watched by a descriptor of it, which no later process with the same number can stand in for.
class Process {
 public:
  /// Nobody: always there.
  Process() = default;
  explicit Process(pid_t pid);

  pid_t pid() const { return pid_; }
  /// False once it has ended. One that cannot be watched counts as there; waits for it still end.
  bool alive() const;
  /// Readable once it has ended; -1 if it cannot be watched.
  int pidfd() const { return pidfd_.get(); }

 private:
  pid_t pid_ = 0;
  bool exited_ = false;
  UniqueFd pidfd_;
};

}  // namespace weft::comm
