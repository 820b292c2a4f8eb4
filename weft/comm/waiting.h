#pragma once
#include <sched.h>

#include <chrono>
#include <thread>

#include "weft/comm/interrupt.h"

namespace weft::comm {

using Milliseconds = std::chrono::milliseconds;

/// Spin-wait hint to the CPU.
inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Makes non-temporal stores visible before the next store.
inline void store_fence() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

/// Waits until `done()` is true. Spins first, for a peer on another core; then yields, for a peer on this core; after
/// 20 ms it sleeps between polls. `poll(waited)` is called periodically and may raise to end the wait.
template <class Done, class Poll>
void wait_until(Done&& done, Poll&& poll) {
  using Clock = std::chrono::steady_clock;
  constexpr int kSpins = 30, kYields = 16;
  constexpr auto kSleepAfter = Milliseconds(20);
  constexpr auto kSleep = std::chrono::microseconds(100);
  for (int spin = 0; spin < kSpins; ++spin) {
    if (done()) return;
    cpu_pause();
  }
  const auto start = Clock::now();
  while (!done()) {
    for (int i = 0; i < kYields; ++i) {
      ::sched_yield();
      if (done()) return;
    }
    const auto waited = Clock::now() - start;
    poll(std::chrono::duration_cast<Milliseconds>(waited));
    check_interrupt();
    if (waited > kSleepAfter) std::this_thread::sleep_for(kSleep);
  }
}

}  // namespace weft::comm
