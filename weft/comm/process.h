#pragma once
#include <sys/types.h>

#include "weft/comm/unique_fd.h"

namespace weft::comm {

/// Another process, watched through a pidfd: a new process that reuses its pid is not mistaken for it.
class Process {
 public:
  /// No process; alive() is always true.
  Process() = default;
  explicit Process(pid_t pid);

  pid_t pid() const { return pid_; }
  /// False once the process has exited. True if it cannot be watched (no pidfd): waits then rely on their timeout.
  bool alive() const;
  /// Readable once the process has exited; -1 if it cannot be watched.
  int pidfd() const { return pidfd_.get(); }

 private:
  pid_t pid_ = 0;
  bool exited_ = false;
  UniqueFd pidfd_;
};

}  // namespace weft::comm
