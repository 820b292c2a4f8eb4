#include "weft/comm/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace weft::comm {

Process::Process(pid_t pid) : pid_(pid), pidfd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  exited_ = !pidfd_ && errno == ESRCH;
}

bool Process::alive() const {
  if (!pidfd_) return !exited_;
  pollfd exited{pidfd_.get(), POLLIN, 0};
  return ::poll(&exited, 1, 0) != 1;
}

}  // namespace weft::comm
