#include "weft/comm/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace weft::comm {

Process::Process(pid_t pid) : pid_(pid), watch_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  gone_ = !watch_ && errno == ESRCH;
}

bool Process::alive() const {
  if (!watch_) return !gone_;
  pollfd ended{watch_.get(), POLLIN, 0};
  return ::poll(&ended, 1, 0) != 1;
}

}  // namespace weft::comm
