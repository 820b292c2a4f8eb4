#pragma once
#include <chrono>
#include <functional>

namespace weft::comm {

/// Runs `act` on a thread of its own and waits for it until `deadline`; raises what it raises. Meanwhile calls `look`
/// every 10 ms, which may raise, and checks for interrupts. False at the deadline: `act` then goes on by itself, so it
/// must own what it uses. For calls of a c10d Store: they block without limit while its server is stopped.
bool finish_by(
    std::chrono::steady_clock::time_point deadline, std::function<void()> act,
    const std::function<void()>& look = [] {});

}  // namespace weft::comm
