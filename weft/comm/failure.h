#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <string>

#include "weft/comm/transport.h"

namespace weft::comm {

enum class FailureReason : uint32_t {
  timeout = 1,      // the peer let the reporter wait too long
  peer_exited,      // the peer's process ended
  mismatch,         // the peer announced something else
  protocol_error,   // the peer's words make no sense
  abandoned,        // the reporter itself gave up the round
  connection_lost,  // the connection to the peer broke
};

/// Why a group can no longer be used; plain values, so that it can lie in shared memory.
struct Failure {
  FailureReason reason{};
  int32_t reporter = 0;               // the rank that noticed
  int32_t peer = 0;                   // the rank it is about
  int32_t pid = 0;                    // of the peer; 0 if it is a thread
  uint64_t seq = 0;                   // number of the round, or channel of a signal
  int64_t rows = 0;                   // that the reporter waited for; -1: for an earlier round to end
  int64_t waited_ms = 0;              // a timeout's
  CollectiveFingerprint local = {};   // what the reporter did
  CollectiveFingerprint remote = {};  // what the peer announced, if they disagree
  std::array<char, 240> note = {};    // the error of one that gave up, if it knows it

  void set_note(std::string_view message);
};

/// "Rank 0 waited 30000 ms for rank 1 (pid 77) in round 5, all_gather of [128, 512] Float …"
std::string text(const Failure& failure);

/// A place in shared memory for the first failure of a group. Zeroed memory is an empty one.
class StickyError {
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
