#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <string>

#include "weft/comm/exchange.h"

namespace weft::comm {

enum class Reason : uint32_t {
  timeout = 1,   // the peer let the finder wait too long
  ended,         // the peer's process ended
  disagreement,  // the peer announced something else
  nonsense,      // the peer's words make no sense
  abandoned,     // the finder itself gave up the round
  lost,          // the connection to the peer broke
};

/// Why a group can no longer be used; plain values, so that it can lie in shared memory.
struct Failure {
  Reason reason{};
  int32_t finder = 0;               // the rank that noticed
  int32_t peer = 0;                 // the rank it is about
  int32_t pid = 0;                  // of the peer; 0 if it is a thread
  uint64_t round = 0;               // number of the round, or channel of a signal
  int64_t rows = 0;                 // that the finder waited for; -1: for an earlier round to end
  int64_t waited_ms = 0;            // a timeout's
  Agreement mine = {};              // what the finder did
  Agreement theirs = {};            // what the peer announced, if they disagree
  std::array<char, 240> note = {};  // the error of one that gave up, if it knows it

  void set_note(std::string_view words);
};

/// "Rank 0 waited 30000 ms for rank 1 (pid 77) in round 5, all_gather of [128, 512] Float …"
std::string text(const Failure& failure);

/// A place in shared memory for the first failure of a group. Zeroed memory is an empty one.
class Poison {
 public:
  bool empty() const { return state_.load(std::memory_order_acquire) == 0; }
  /// Keeps the first.
  void put(const Failure& failure);
  /// Of one that is not empty.
  Failure get() const;

 private:
  std::atomic<uint32_t> state_{0};  // 1: being written, 2: written
  Failure failure_;
};

}  // namespace weft::comm
