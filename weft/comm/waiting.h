#pragma once
#include <sched.h>

#include <chrono>
#include <thread>

#include "weft/comm/interrupt.h"

namespace weft::comm {

using Milliseconds = std::chrono::milliseconds;

/// Tells the core that this is a spin.
inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Stores that bypass the cache become visible before the next one.
inline void store_fence() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

/// Returns when `done()` is true. First spins, for a peer on another core; then gives way, for a peer on this one;
/// after a while sleeps between looks. `poll(waited)` is called now and then: it raises if there is no use in waiting.
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
