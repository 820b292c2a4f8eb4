#include "weft/comm/interrupt.h"

#include <atomic>
#include <chrono>

namespace weft::comm {
namespace {

std::atomic<InterruptCheck> installed = nullptr;

}  // namespace

void set_interrupt_check(InterruptCheck check) { installed = check; }

void check_interrupt() {
  using Clock = std::chrono::steady_clock;
  constexpr auto kCheckInterval = std::chrono::milliseconds(50);
  thread_local Clock::time_point last;
  const auto check = installed.load(std::memory_order_relaxed);
  if (!check) return;
  const auto now = Clock::now();
  if (now - last < kCheckInterval) return;
  last = now;
  check();
}

}  // namespace weft::comm
