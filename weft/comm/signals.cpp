#include "weft/comm/signals.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <new>
#include <thread>

namespace weft::comm {
namespace {

constexpr int kRowBits = 40;
constexpr int64_t kMaxRows = (int64_t{1} << kRowBits) - 1;

/// The collective a rank is about to run. `seq` is stored last, with release.
struct alignas(kCacheLine) Announcement {
  std::atomic<uint64_t> seq;
  uint64_t group_id;
  uint64_t free_memory;
  CollectiveFingerprint fingerprint;
};

/// Number of ready rows in the low kRowBits bits, sequence number above.
struct alignas(kCacheLine) Count {
  std::atomic<uint64_t> word;

  static uint64_t seq_bits(uint64_t seq) { return seq << kRowBits; }
};

}  // namespace

/// Control block of one rank. Words that other ranks poll are on separate cache lines.
struct Signals::ControlBlock {
  alignas(kCacheLine) StickyError sticky_error;
  alignas(kCacheLine) std::atomic<uint64_t> finished;
  alignas(kCacheLine) std::atomic<uint64_t> heartbeat;  // incremented while this rank waits
  std::atomic<int32_t> waits_for;                       // rank it waited for at the last increment
  std::array<Announcement, 2> announcements;
  // Followed by two counts per rank.

  Count& count(uint64_t seq, int to) { return reinterpret_cast<Count*>(this + 1)[2 * to + seq % 2]; }
};

size_t Signals::control_block_bytes(int size) {
  return sizeof(ControlBlock) + 2 * sizeof(Count) * static_cast<size_t>(size);
}

Signals::Signals(Options options) : options_(std::move(options)) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
  TORCH_CHECK_VALUE(options_.timeout.count() > 0, "Expected a timeout greater than 0 ms, got ",
                    options_.timeout.count(), " ms.");
}

void Signals::check() const {
  const auto& sticky_error = control_block(rank()).sticky_error;
  if (C10_UNLIKELY(!sticky_error.empty())) C10_THROW_ERROR(DistError, text(sticky_error.get()));
}

void Signals::fail(FailureReason reason, uint64_t seq, int peer, Failure failure) {
  check();  // an earlier failure takes precedence
  failure.reason = reason;
  failure.peer = peer;
  failure.pid = options_.peers[peer].process->pid();
  failure.seq = seq;
  failure.local = fingerprint(seq);
  for (int r = 0; r < size(); ++r) control_block(r).sticky_error.put(failure);
  check();
  C10_THROW_ERROR(DistError, text(failure));
}

template <class Done>
void Signals::wait_for(uint64_t seq, int peer, int64_t rows, Done&& done) {
  wait_until(
      [&] {
        if (done()) return true;
        check();
        return false;
      },
      [&](Milliseconds waited) {
        heartbeat(peer);
        if (!options_.peers[peer].process->alive() && !done())
          fail(FailureReason::peer_exited, seq, peer, {.reporter = rank(), .rows = rows});
        if (waited >= options_.timeout)
          fail_timeout(seq, peer, {.reporter = rank(), .rows = rows, .waited_ms = waited.count()});
      });
}

void Signals::heartbeat(int waits_for) {
  auto& local = control_block(rank());
  local.waits_for.store(waits_for, std::memory_order_relaxed);
  local.heartbeat.fetch_add(1, std::memory_order_release);
}

/// The late peer may itself wait for another rank. Follows `waits_for` to a rank without a heartbeat and reports that
/// one.
void Signals::fail_timeout(uint64_t seq, int peer, Failure failure) {
  constexpr Milliseconds kHeartbeatWindow{200};  // a waiting rank with a core to run on beats every 0.1 ms
  std::vector<uint64_t> before(size());
  for (int r = 0; r < size(); ++r) before[r] = control_block(r).heartbeat.load(std::memory_order_acquire);
  const auto waits = [&](int r) { return control_block(r).heartbeat.load(std::memory_order_acquire) != before[r]; };
  int culprit = peer, reporter = rank();
  const auto deadline = std::chrono::steady_clock::now() + kHeartbeatWindow;
  for (int hops = 0; std::chrono::steady_clock::now() < deadline;) {
    check();
    heartbeat(peer);
    if (!options_.peers[culprit].process->alive()) {
      failure.reporter = reporter;
      fail(FailureReason::peer_exited, seq, culprit, failure);
    }
    const int next = waits(culprit) ? control_block(culprit).waits_for.load(std::memory_order_relaxed) : culprit;
    if (next < 0 || next >= size() || next == rank() || hops >= size()) {  // a cycle
      culprit = peer;
      reporter = rank();
      break;
    }
    if (next != culprit) {
      reporter = std::exchange(culprit, next);
      ++hops;
    }
    std::this_thread::sleep_for(Milliseconds(1));
  }
  failure.reporter = reporter;
  fail(FailureReason::timeout, seq, culprit, failure);
}

uint64_t Signals::start(const CollectiveFingerprint& fingerprint, uint64_t free_memory) {
  check();
  const uint64_t seq = last_ + 1;
  auto& opened = open(seq);
  TORCH_CHECK(opened.finished, "Finish collective ", opened.seq, " before starting collective ", seq,
              ": at most two may be open.");
  TORCH_CHECK_VALUE(fingerprint.rows >= 0 && fingerprint.rows <= kMaxRows && fingerprint.columns >= 0,
                    "Expected a block of 0 to ", kMaxRows, " rows and at least 0 columns, got [", fingerprint.rows,
                    ", ", fingerprint.columns, "].");
  last_ = seq;
  opened = {.seq = seq, .fingerprint = fingerprint, .matched = std::vector<char>(size()), .finished = false};
  for (int peer = 0; peer < size(); ++peer)
    wait_for(seq, peer, -1, [&] { return control_block(peer).finished.load(std::memory_order_acquire) + 2 >= seq; });
  auto& local = control_block(rank());
  for (int to = 0; to < size(); ++to) local.count(seq, to).word.store(Count::seq_bits(seq), std::memory_order_relaxed);
  auto& announcement = local.announcements[seq % 2];
  announcement.group_id = options_.group_id;
  announcement.free_memory = free_memory;
  announcement.fingerprint = fingerprint;
  announcement.seq.store(seq, std::memory_order_release);
  return seq;
}

/// True once the peer has announced the collective; raises if its fingerprint differs.
bool Signals::is_matched(uint64_t seq, int peer) {
  auto& opened = open(seq);
  if (opened.matched[peer]) return true;
  const auto& remote = control_block(peer).announcements[seq % 2];
  const uint64_t announced = remote.seq.load(std::memory_order_acquire);
  if (announced < seq) return false;
  const CollectiveFingerprint fingerprint = remote.fingerprint;
  if (announced > seq || remote.group_id != options_.group_id)
    fail(FailureReason::protocol_error, seq, peer, {.reporter = rank()});
  if (fingerprint != opened.fingerprint)
    fail(FailureReason::mismatch, seq, peer, {.reporter = rank(), .remote = fingerprint});
  opened.matched[peer] = 1;
  return true;
}

void Signals::wait_for_match(uint64_t seq, int peer) {
  wait_for(seq, peer, 0, [&] { return is_matched(seq, peer); });
}

uint64_t Signals::min_free_memory(uint64_t seq) {
  uint64_t least = control_block(rank()).announcements[seq % 2].free_memory;
  for (int peer = 0; peer < size(); ++peer) {
    wait_for_match(seq, peer);
    least = std::min(least, control_block(peer).announcements[seq % 2].free_memory);
  }
  return least;
}

void Signals::mark_ready(uint64_t seq, int to, int64_t rows) {
  store_fence();
  const uint64_t word = Count::seq_bits(seq) | static_cast<uint64_t>(rows);
  control_block(rank()).count(seq, to).word.store(word, std::memory_order_release);
}

int64_t Signals::arrived(uint64_t seq, int peer, bool broadcast) {
  check();
  if (!is_matched(seq, peer)) return 0;
  const uint64_t word = control_block(peer).count(seq, broadcast ? peer : rank()).word.load(std::memory_order_acquire);
  const auto rows = static_cast<int64_t>(word & kMaxRows);
  if (word - static_cast<uint64_t>(rows) != Count::seq_bits(seq) || rows > fingerprint(seq).rows)
    fail(FailureReason::protocol_error, seq, peer, {.reporter = rank(), .rows = rows});
  return rows;
}

void Signals::wait(uint64_t seq, int peer, bool broadcast, int64_t rows) {
  wait_for(seq, peer, rows, [&] { return arrived(seq, peer, broadcast) >= rows && is_matched(seq, peer); });
}

void Signals::finish(uint64_t seq) {
  open(seq).finished = true;
  while (finished_ < last_ && open(finished_ + 1).finished) ++finished_;
  control_block(rank()).finished.store(finished_, std::memory_order_release);
}

void Signals::abandon(uint64_t seq, std::string_view reason) noexcept {
  Failure failure{
      .reason = FailureReason::abandoned, .reporter = rank(), .peer = rank(), .seq = seq, .local = fingerprint(seq)};
  failure.set_note(reason);
  for (int r = 0; r < size(); ++r) control_block(r).sticky_error.put(failure);
}

}  // namespace weft::comm
