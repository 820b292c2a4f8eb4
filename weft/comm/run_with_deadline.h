#pragma once
#include <chrono>
#include <functional>

namespace weft::comm {

/// Runs `fn` on a new thread and waits until it returns or `deadline` passes; rethrows its exception. While waiting,
/// calls `poll` every 10 ms, which may raise, and checks for interrupts. Returns false at the deadline; `fn` then keeps
/// running, so it must own everything it uses. Needed for c10d Store calls, which block without limit while the server
/// is stopped.
bool run_with_deadline(
    std::chrono::steady_clock::time_point deadline, std::function<void()> fn,
    const std::function<void()>& poll = [] {});

}  // namespace weft::comm
