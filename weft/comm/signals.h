#pragma once
#include <array>
#include <vector>

#include "weft/comm/failure.h"
#include "weft/comm/process.h"
#include "weft/comm/transport.h"
#include "weft/comm/waiting.h"

namespace weft::comm {

/// The words by which the ranks of a group keep in step, in a pad of shared memory per rank, which that rank writes and
/// all read. Rounds are numbered 1, 2, … on every rank. A round begins with an announcement of what the rank is about
/// to do; each reader compares it with its own before it looks at anything else. Then the rank publishes rows as they
/// become final. When it needs nothing more of a round, it says so by the number of that round.
///
/// Announcements, counts of rows and data have two places, for odd and even rounds. A rank takes those of round n once
/// every rank has finished round n - 2: all it needs to know is in the words that the others have written anyway, and
/// there is no barrier. Nobody can still read what it overwrites, and nobody can mistake a word of round n - 2 for one
/// of round n, because the number of the round is part of it.
///
/// The first failure goes into every pad; every wait and every look sees it. Not thread-safe.
class Signals {
 public:
  struct Peer {
    std::byte* control_block = nullptr;  // `control_block_bytes` bytes, zeroed before the first rank starts
    const Process* process = nullptr;    // outlives this
  };
  struct Options {
    int rank = 0;
    std::vector<Peer> peers;  // all ranks, this one included
    uint64_t group_id = 0;    // the same number on all ranks, another in other groups
    Milliseconds timeout{};   // of every wait
  };

  static size_t control_block_bytes(int size);

  explicit Signals(Options options);

  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.peers.size()); }
  const CollectiveFingerprint& fingerprint(uint64_t seq) const { return open(seq).fingerprint; }

  /// Begins the next round: waits until its places are free, then announces it. Two may be open. Returns its number.
  /// `free_memory`: what this rank could take, for `min_free_memory`.
  uint64_t start(const CollectiveFingerprint& fingerprint, uint64_t free_memory = 0);
  /// Waits until the peer has announced the same.
  void wait_for_match(uint64_t seq, int peer);
  /// Meets all peers. The least that any rank announced.
  uint64_t min_free_memory(uint64_t seq);
  /// Rows [0, rows) for rank `to` are final. `to` = rank(): those for everybody.
  void mark_ready(uint64_t seq, int to, int64_t rows);
  /// How many rows the peer has published for this rank or, if `broadcast`, for everybody; 0 if it is not there yet.
  int64_t arrived(uint64_t seq, int peer, bool broadcast);
  /// Returns when these are at least `rows`.
  int64_t wait(uint64_t seq, int peer, bool broadcast, int64_t rows);
  /// This rank reads no more of the round.
  void finish(uint64_t seq);
  /// This rank cannot go on, for the reason given if it is known: no other shall wait for it.
  void abandon(uint64_t seq, std::string_view reason = "") noexcept;

  /// Raises what any rank has reported.
  void check() const;

 private:
  struct ControlBlock;
  struct OpenCollective {
    uint64_t seq = 0;
    CollectiveFingerprint fingerprint;
    std::vector<char> matched;
    bool finished = true;
  };

  ControlBlock& control_block(int rank) const {
    return *reinterpret_cast<ControlBlock*>(options_.peers[rank].control_block);
  }
  OpenCollective& open(uint64_t seq) { return open_[seq % 2]; }
  const OpenCollective& open(uint64_t seq) const { return open_[seq % 2]; }
  bool is_matched(uint64_t seq, int peer);
  /// Shows that this rank is alive and waits for another.
  void heartbeat(int waits_for);
  [[noreturn]] void fail_timeout(uint64_t seq, int peer, Failure failure);
  [[noreturn]] void fail(FailureReason reason, uint64_t seq, int peer, Failure failure);
  /// `wait_until` with the checks that every wait makes.
  template <class Done>
  void wait_for(uint64_t seq, int peer, int64_t rows, Done&& done);

  Options options_;
  uint64_t last_ = 0;      // round that was started
  uint64_t finished_ = 0;  // all rounds up to it
  std::array<OpenCollective, 2> open_;
};

}  // namespace weft::comm
