#pragma once
#include <array>
#include <vector>

#include "weft/comm/exchange.h"
#include "weft/comm/failure.h"
#include "weft/comm/process.h"
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
    std::byte* pad = nullptr;          // `pad_bytes` bytes, zeroed before the first rank starts
    const Process* process = nullptr;  // outlives this
  };
  struct Options {
    int rank = 0;
    std::vector<Peer> peers;  // all ranks, this one included
    uint64_t group = 0;       // the same number on all ranks, another in other groups
    Milliseconds timeout{};   // of every wait
  };

  static size_t pad_bytes(int size);

  explicit Signals(Options options);

  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.peers.size()); }
  const Agreement& about(uint64_t round) const { return open(round).about; }

  /// Begins the next round: waits until its places are free, then announces it. Two may be open. Returns its number.
  /// `free_memory`: what this rank could take, for `least_free_memory`.
  uint64_t start(const Agreement& about, uint64_t free_memory = 0);
  /// Waits until the peer has announced the same.
  void meet(uint64_t round, int peer);
  /// Meets all peers. The least that any rank announced.
  uint64_t least_free_memory(uint64_t round);
  /// Rows [0, rows) for rank `to` are final. `to` = rank(): those for everybody.
  void publish(uint64_t round, int to, int64_t rows);
  /// How many rows the peer has published for this rank or, if `common`, for everybody; 0 if it is not there yet.
  int64_t arrived(uint64_t round, int peer, bool common);
  /// Returns when these are at least `rows`.
  int64_t wait(uint64_t round, int peer, bool common, int64_t rows);
  /// This rank reads no more of the round.
  void finish(uint64_t round);
  /// This rank cannot go on, for the reason given if it is known: no other shall wait for it.
  void abandon(uint64_t round, std::string_view why = "") noexcept;

  /// Raises what any rank has reported.
  void check() const;

 private:
  struct Pad;
  struct Open {
    uint64_t round = 0;
    Agreement about;
    std::vector<char> met;
    bool finished = true;
  };

  Pad& pad(int rank) const { return *reinterpret_cast<Pad*>(options_.peers[rank].pad); }
  Open& open(uint64_t round) { return open_[round % 2]; }
  const Open& open(uint64_t round) const { return open_[round % 2]; }
  bool met(uint64_t round, int peer);
  /// Shows that this rank is alive and waits for another.
  void beat(int waits_for);
  [[noreturn]] void fail_late(uint64_t round, int peer, Failure more);
  [[noreturn]] void fail(Reason reason, uint64_t round, int peer, Failure more);
  /// `wait_until` with the checks that every wait makes.
  template <class Done>
  void wait_for(uint64_t round, int peer, int64_t rows, Done&& done);

  Options options_;
  uint64_t last_ = 0;      // round that was started
  uint64_t finished_ = 0;  // all rounds up to it
  std::array<Open, 2> open_;
};

}  // namespace weft::comm
