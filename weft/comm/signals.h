#pragma once
#include <array>
#include <vector>

#include "weft/comm/failure.h"
#include "weft/comm/process.h"
#include "weft/comm/transport.h"
#include "weft/comm/waiting.h"

namespace weft::comm {

/// Synchronizes the ranks of a group through shared memory: one control block per rank, which that rank writes and all
/// ranks read. Collectives have sequence numbers 1, 2, … on every rank. A rank announces the fingerprint of a
/// collective; a reader compares it with its own before it reads anything else. Then the rank marks rows ready as they
/// become final. When it needs nothing more from a collective, it stores that sequence number as finished.
///
/// Announcements, row counts and data are double-buffered by the parity of the sequence number. A rank reuses the
/// buffers of collective n - 2 for collective n once every rank has finished n - 2, which needs no barrier. No rank
/// still reads what it overwrites, and no word of n - 2 is mistaken for one of n, because each word contains its
/// sequence number.
///
/// The first failure is written into every control block; every wait and every poll sees it. Not thread-safe.
class Signals {
 public:
  struct Peer {
    std::byte* control_block = nullptr;  // `control_block_bytes` bytes, zeroed before the first rank starts
    const Process* process = nullptr;    // must outlive the Signals
  };
  struct Options {
    int rank = 0;
    std::vector<Peer> peers;  // all ranks, including this one
    uint64_t group_id = 0;    // the same on all ranks of a group, different between groups
    Milliseconds timeout{};   // of every wait
  };

  static size_t control_block_bytes(int size);

  explicit Signals(Options options);

  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.peers.size()); }
  const CollectiveFingerprint& fingerprint(uint64_t seq) const { return open(seq).fingerprint; }

  /// Waits until the buffers of the next collective are free, announces it and returns its sequence number. At most two
  /// collectives may be open. `free_memory`: bytes this rank can allocate, for `min_free_memory`.
  uint64_t start(const CollectiveFingerprint& fingerprint, uint64_t free_memory = 0);
  /// Waits until the peer has announced the collective; raises on every rank if its fingerprint differs.
  void wait_for_match(uint64_t seq, int peer);
  /// Waits for the announcements of all peers and returns the smallest announced `free_memory`.
  uint64_t min_free_memory(uint64_t seq);
  /// Rows [0, rows) of the block for rank `to` are final. `to` = rank(): the block for all ranks.
  void mark_ready(uint64_t seq, int to, int64_t rows);
  /// Number of rows that the peer has marked ready for this rank or, with `broadcast`, for all ranks; 0 if the peer has
  /// not announced the collective.
  int64_t arrived(uint64_t seq, int peer, bool broadcast);
  /// Waits until `arrived` is at least `rows`.
  void wait(uint64_t seq, int peer, bool broadcast, int64_t rows);
  /// This rank reads nothing more from the collective.
  void finish(uint64_t seq);
  /// This rank cannot finish the collective: fails the group, so that no other rank waits for it.
  void abandon(uint64_t seq, std::string_view reason = "") noexcept;

  /// Raises the failure that any rank has reported.
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
  /// Tells the other ranks that this one is alive and waits for rank `waits_for`.
  void heartbeat(int waits_for);
  [[noreturn]] void fail_timeout(uint64_t seq, int peer, Failure failure);
  [[noreturn]] void fail(FailureReason reason, uint64_t seq, int peer, Failure failure);
  /// `wait_until` with the checks of every wait: sticky error, peer process, timeout.
  template <class Done>
  void wait_for(uint64_t seq, int peer, int64_t rows, Done&& done);

  Options options_;
  uint64_t last_ = 0;      // last collective that was started
  uint64_t finished_ = 0;  // all collectives up to this one are finished
  std::array<OpenCollective, 2> open_;
};

}  // namespace weft::comm
