#include "weft/comm/signals.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <new>
#include <thread>

namespace weft::comm {
namespace {

constexpr size_t kLine = 64;
constexpr int kRowBits = 40;
constexpr int64_t kMostRows = (int64_t{1} << kRowBits) - 1;

#ifdef WEFT_PLANT_A_RACE  // a mistake that the thread sanitizer must find
constexpr auto kPublish = std::memory_order_relaxed;
#else
constexpr auto kPublish = std::memory_order_release;
#endif

/// What a rank is about to do. All is written before `round`, which is stored with release.
struct alignas(kLine) Announcement {
  std::atomic<uint64_t> round;
  uint64_t group;
  uint64_t free_memory;
  Agreement about;
};

/// Rows that are final, below the number of the round.
struct alignas(kLine) Count {
  std::atomic<uint64_t> word;

  static uint64_t mark(uint64_t round) { return round << kRowBits; }
};

}  // namespace

/// One rank's words. Each word that one rank waits for has a cache line of its own.
struct Signals::Pad {
  alignas(kLine) Poison poison;
  alignas(kLine) std::atomic<uint64_t> finished;
  alignas(kLine) std::atomic<uint64_t> beat;  // grows while this rank waits
  std::atomic<int32_t> waits_for;             // the rank it waited for when it grew
  std::array<Announcement, 2> announcements;
  // Two counts for each rank follow.

  Count& count(uint64_t round, int to) { return reinterpret_cast<Count*>(this + 1)[2 * to + round % 2]; }
};

size_t Signals::pad_bytes(int size) { return sizeof(Pad) + 2 * sizeof(Count) * static_cast<size_t>(size); }

Signals::Signals(Options options) : options_(std::move(options)) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
  TORCH_CHECK_VALUE(options_.timeout.count() > 0, "The timeout of a group must be more than 0.");
}

void Signals::check() const {
  const auto& poison = pad(rank()).poison;
  if (C10_UNLIKELY(!poison.empty())) C10_THROW_ERROR(DistError, text(poison.get()));
}

void Signals::fail(Reason reason, uint64_t round, int peer, Failure more) {
  check();  // what came first
  more.reason = reason;
  more.peer = peer;
  more.pid = options_.peers[peer].process->pid();
  more.round = round;
  more.mine = about(round);
  for (int r = 0; r < size(); ++r) pad(r).poison.put(more);
  check();
  C10_THROW_ERROR(DistError, text(more));
}

template <class Done>
void Signals::wait_for(uint64_t round, int peer, int64_t rows, Done&& done) {
  wait_until(
      [&] {
        if (done()) return true;
        check();
        return false;
      },
      [&](Milliseconds waited) {
        beat(peer);
        if (!options_.peers[peer].process->alive() && !done())
          fail(Reason::ended, round, peer, {.finder = rank(), .rows = rows});
        if (waited >= options_.timeout)
          fail_late(round, peer, {.finder = rank(), .rows = rows, .waited_ms = waited.count()});
      });
}

void Signals::beat(int waits_for) {
  auto& mine = pad(rank());
  mine.waits_for.store(waits_for, std::memory_order_relaxed);
  mine.beat.fetch_add(1, std::memory_order_release);
}

/// A peer that is late may be waiting itself, for one that is gone: that one is named. Whoever waits, beats.
void Signals::fail_late(uint64_t round, int peer, Failure more) {
  constexpr Milliseconds kHearing{200};  // a rank that waits beats every 0.1 ms, if it gets a core
  std::vector<uint64_t> before(size());
  for (int r = 0; r < size(); ++r) before[r] = pad(r).beat.load(std::memory_order_acquire);
  const auto waits = [&](int r) { return pad(r).beat.load(std::memory_order_acquire) != before[r]; };
  int culprit = peer, finder = rank();
  const auto deadline = std::chrono::steady_clock::now() + kHearing;
  for (int hops = 0; std::chrono::steady_clock::now() < deadline;) {
    check();
    beat(peer);
    if (!options_.peers[culprit].process->alive()) {
      more.finder = finder;
      fail(Reason::ended, round, culprit, more);
    }
    const int next = waits(culprit) ? pad(culprit).waits_for.load(std::memory_order_relaxed) : culprit;
    if (next < 0 || next >= size() || next == rank() || hops >= size()) {  // they wait for each other
      culprit = peer;
      finder = rank();
      break;
    }
    if (next != culprit) {
      finder = std::exchange(culprit, next);
      ++hops;
    }
    std::this_thread::sleep_for(Milliseconds(1));
  }
  more.finder = finder;
  fail(Reason::timeout, round, culprit, more);
}

uint64_t Signals::start(const Agreement& about, uint64_t free_memory) {
  check();
  const uint64_t round = last_ + 1;
  auto& opened = open(round);
  TORCH_CHECK(opened.finished, "Round ", opened.round, " must be finished before round ", round,
              " starts: two may be open.");
  TORCH_CHECK_VALUE(about.rows >= 0 && about.rows <= kMostRows && about.columns >= 0, "A block of [", about.rows, ", ",
                    about.columns, "] was given.");
  last_ = round;
  opened = {.round = round, .about = about, .met = std::vector<char>(size()), .finished = false};
  for (int peer = 0; peer < size(); ++peer)
    wait_for(round, peer, -1, [&] { return pad(peer).finished.load(std::memory_order_acquire) + 2 >= round; });
  auto& mine = pad(rank());
  for (int to = 0; to < size(); ++to) mine.count(round, to).word.store(Count::mark(round), std::memory_order_relaxed);
  auto& announcement = mine.announcements[round % 2];
  announcement.group = options_.group;
  announcement.free_memory = free_memory;
  announcement.about = about;
  announcement.round.store(round, std::memory_order_release);
  return round;
}

/// True once the peer has announced the round; raises if it announced something else.
bool Signals::met(uint64_t round, int peer) {
  auto& opened = open(round);
  if (opened.met[peer]) return true;
  const auto& theirs = pad(peer).announcements[round % 2];
  const uint64_t announced = theirs.round.load(std::memory_order_acquire);
  if (announced < round) return false;
  const Agreement about = theirs.about;
  if (announced > round || theirs.group != options_.group) fail(Reason::nonsense, round, peer, {.finder = rank()});
  if (about != opened.about) fail(Reason::disagreement, round, peer, {.finder = rank(), .theirs = about});
  opened.met[peer] = 1;
  return true;
}

void Signals::meet(uint64_t round, int peer) {
  wait_for(round, peer, 0, [&] { return met(round, peer); });
}

uint64_t Signals::least_free_memory(uint64_t round) {
  uint64_t least = pad(rank()).announcements[round % 2].free_memory;
  for (int peer = 0; peer < size(); ++peer) {
    meet(round, peer);
    least = std::min(least, pad(peer).announcements[round % 2].free_memory);
  }
  return least;
}

void Signals::publish(uint64_t round, int to, int64_t rows) {
  flush_stores();
  pad(rank()).count(round, to).word.store(Count::mark(round) | static_cast<uint64_t>(rows), kPublish);
}

int64_t Signals::arrived(uint64_t round, int peer, bool common) {
  check();
  if (!met(round, peer)) return 0;
  const uint64_t word = pad(peer).count(round, common ? peer : rank()).word.load(std::memory_order_acquire);
  const auto rows = static_cast<int64_t>(word & kMostRows);
  if (word - static_cast<uint64_t>(rows) != Count::mark(round) || rows > about(round).rows)
    fail(Reason::nonsense, round, peer, {.finder = rank(), .rows = rows});
  return rows;
}

int64_t Signals::wait(uint64_t round, int peer, bool common, int64_t rows) {
  int64_t there = 0;
  wait_for(round, peer, rows, [&] { return (there = arrived(round, peer, common)) >= rows && met(round, peer); });
  return there;
}

void Signals::finish(uint64_t round) {
  open(round).finished = true;
  while (finished_ < last_ && open(finished_ + 1).finished) ++finished_;
  pad(rank()).finished.store(finished_, std::memory_order_release);
}

void Signals::abandon(uint64_t round, std::string_view why) noexcept {
  Failure failure{.reason = Reason::abandoned, .finder = rank(), .peer = rank(), .round = round, .mine = about(round)};
  failure.set_note(why);
  for (int r = 0; r < size(); ++r) pad(r).poison.put(failure);
}

}  // namespace weft::comm
