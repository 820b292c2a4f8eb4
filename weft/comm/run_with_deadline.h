#pragma once
#include <chrono>
#include <functional>

namespace weft::comm {

/// Runs `fn` on a thread of its own and waits for it until `deadline`; raises what it raises. Meanwhile calls `poll`
/// every 10 ms, which may raise, and checks for interrupts. False at the deadline: `fn` then goes on by itself, so it
/// must own what it uses. For calls of a c10d Store: they block without limit while its server is stopped.
bool run_with_deadline(
    std::chrono::steady_clock::time_point deadline, std::function<void()> fn,
    const std::function<void()>& poll = [] {});

}  // namespace weft::comm
