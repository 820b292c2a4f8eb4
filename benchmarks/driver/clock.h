#pragma once
#include <ctime>

namespace bench {

/// Seconds: CPU time of this thread if it does all the work (threads = 1), otherwise wall-clock time.
inline double now(int threads) {
  timespec time{};
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace bench
