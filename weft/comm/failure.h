#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <string>

#include "weft/comm/transport.h"

namespace weft::comm {

/// Alignment of what different ranks write in shared memory.
constexpr size_t kCacheLine = 64;

enum class FailureReason : uint32_t {
  timeout = 1,      // the reporter waited for the peer until the timeout
  peer_exited,      // the peer's process exited
  mismatch,         // the peer announced another collective
  protocol_error,   // the peer sent or wrote invalid data
  abandoned,        // the reporter dropped the collective before it finished
  connection_lost,  // the connection to the peer broke
};

/// Why a group can no longer be used. Trivially copyable: it is stored in shared memory and sent as bytes.
struct Failure {
  FailureReason reason{};
  int32_t reporter = 0;               // rank that detected the failure
  int32_t peer = 0;                   // rank that caused it
  int32_t pid = 0;                    // of the peer; 0 if the peer is a thread
  uint64_t seq = 0;                   // sequence number of the collective, or channel of a signal
  int64_t rows = 0;                   // rows the reporter waited for; -1: for collective seq - 2 to finish
  int64_t waited_ms = 0;              // timeout only
  CollectiveFingerprint local = {};   // collective of the reporter
  CollectiveFingerprint remote = {};  // collective of the peer; mismatch only
  std::array<char, 240> note = {};    // the reporter's own error; abandoned only, may be empty

  void set_note(std::string_view message);
};

/// "Rank 0 waited 30000 ms for rank 1 (pid 77) in collective 5 (all_gather of [128, 512] float32), up to row 64. …"
std::string text(const Failure& failure);

/// The first failure of a group, in shared memory. Zeroed memory is a valid, empty StickyError.
class StickyError {
 public:
  bool empty() const { return state_.load(std::memory_order_acquire) == 0; }
  /// Stores `failure` unless one is stored already.
  void put(const Failure& failure);
  /// Requires !empty().
  Failure get() const;

 private:
  std::atomic<uint32_t> state_{0};  // 1: being written, 2: written
  Failure failure_;
};

}  // namespace weft::comm
