#include "weft/comm/ucx/communicator.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "weft/comm/interrupt.h"
#include "weft/comm/ucx/address_exchange.h"
#include "weft/comm/ucx/devices.h"

namespace weft::comm::ucx {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::chrono::microseconds kProgressInterval{50};  // while computing: progress costs a system call
constexpr int kIdlePolls = 64;                              // before the thread sleeps
constexpr milliseconds kMaxSleep{50};                       // between checks of deadline and interrupts
// A rank raises and disconnects within 1 s of its timeout: the sum of the next two and of closing the endpoints
// (200 ms) must be below 1 s.
constexpr milliseconds kQueryTimeout{250};  // for replies; a waiting rank replies at once
constexpr milliseconds kNoticeFlush{250};   // for the exchange of failure notices
constexpr milliseconds kNoticeWait{150};    // for the notice of a peer whose connection broke

}  // namespace

Communicator::Communicator(UcxOptions options, std::nullptr_t) : options_(std::move(options)), peers_(options_.size) {}

Communicator::Communicator(const UcxOptions& options) : Communicator(options, nullptr) {
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "UCX transport: expected a timeout greater than 0 ms, got ",
                    options.timeout.count(), " ms.");
  TORCH_CHECK_VALUE(size() <= kMaxRanks, "UCX transport: expected at most ", kMaxRanks, " ranks, got ", size(), ".");
  const auto all = exchange_addresses(options, [&] {
    worker_ = std::make_unique<Worker>(size(), net_devices(options.store));
    return worker_->address();
  });
  token_ = all.token;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    worker_->connect(r, all.addresses[r]);
    post_receives(r);
  }
  finish(begin({.token = token_, .rows = kWireVersion}, {}));  // a collective without data, checks the connections
  remove_record(options, all);
}

Communicator::~Communicator() {
  if (!worker_) return;
  for (auto& collective : collectives_) collective.cancel();
  for (auto& peer : peers_) {
    for (auto* transfer : {&peer.notice_received, &peer.query_received, &peer.reply_received})
      worker_->cancel_receive(*transfer);
  }
}

void Communicator::post_receives(int r) {
  auto& peer = peers_[r];
  worker_->receive(notice_tag(token_, r), &peer.notice_in, sizeof(Notice), peer.notice_received);
  worker_->receive(wait_query_tag(token_, r, false), &peer.query_in, sizeof(WaitQuery), peer.query_received);
  worker_->receive(wait_query_tag(token_, r, true), &peer.reply_in, sizeof(WaitQuery), peer.reply_received);
}

CollectiveState& Communicator::start(const CollectiveFingerprint& fingerprint, const at::Tensor& local) {
  // Read failure notices before sending: a send to a disconnected peer would fail with a less specific error.
  for (int i = 0; i < kIdlePolls && worker_->progress(); ++i) {
  }
  check_for_failures();
  return begin(header(token_, ++seq_, fingerprint), local);
}

CollectiveState& Communicator::begin(const Header& header, const at::Tensor& local) {
  auto* const collective =
      std::find_if(collectives_.begin(), collectives_.end(), [](const CollectiveState& r) { return !r.open(); });
  TORCH_CHECK(collective != collectives_.end(), "UCX transport of group '", options_.group,
              "': two collectives are open. Finish one before starting another.");
  collective->start(*worker_, rank(), size(), header, local);
  return *collective;
}

void Communicator::progress() {
  worker_->progress();
  check_for_failures();
  last_progress_ = Clock::now();
}

void Communicator::progress_throttled() {
  if (Clock::now() - last_progress_ >= kProgressInterval) progress();
}

void Communicator::check_for_failures() {
  if (failure_) throw_failed();
  reply_to_queries();
  if (const auto* failure = reported()) fail(*failure);
  for (auto& collective : collectives_) {
    if (!collective.open()) continue;
    if (const auto failure = collective.progress())
      failure->reason == FailureReason::connection_lost ? fail_disconnected(*failure) : fail(*failure);
    for (int r = 0; r < size(); ++r)
      if (!collective.completed(r) && worker_->broken(r))
        fail_disconnected(collective.failure(FailureReason::connection_lost, r));
  }
}

const Failure* Communicator::reported() const {
  for (const auto& peer : peers_)
    if (peer.notice_received.done() && peer.notice_in.token == token_) return &peer.notice_in.failure;
  return nullptr;
}

void Communicator::reply_to_queries() {
  for (int r = 0; r < size(); ++r) {
    auto& peer = peers_[r];
    const bool asked = peer.query_received.done() && peer.query_in.token == token_;
    if (!asked || peer.reply_sent.state != Transfer::State::none || worker_->broken(r)) continue;
    peer.reply_out = {token_, 1, waits_for_};
    worker_->send(r, wait_query_tag(token_, rank(), true), &peer.reply_out, sizeof(WaitQuery), peer.reply_sent);
  }
}

void Communicator::wait(const CollectiveState& collective, int peer, int64_t rows, const std::function<bool()>& done) {
  struct Waiting {
    int& target;
    ~Waiting() { target = WaitQuery::kNone; }
  } const waiting{waits_for_};
  waits_for_ = peer;
  const auto deadline = Clock::now() + options_.timeout;
  for (int idle = 0;;) {
    check_for_failures();
    if (done()) return;
    idle = worker_->progress() ? 0 : idle + 1;
    const auto remaining = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    if (remaining.count() <= 0) fail_timeout(collective, peer, rows);
    if (idle <= kIdlePolls) continue;
    check_interrupt();
    worker_->sleep(std::min(remaining, kMaxSleep));
  }
}

void Communicator::progress_for(milliseconds max_wait, const std::function<bool()>& done) {
  const auto deadline = Clock::now() + max_wait;
  while (!done() && Clock::now() < deadline) {
    if (!worker_->progress()) worker_->sleep(milliseconds(1));
    reply_to_queries();
  }
}

/// The late peer may itself wait for another rank: reports the root cause.
void Communicator::fail_timeout(const CollectiveState& collective, int peer, int64_t rows) {
  const auto cause = find_root_cause(peer);
  if (const auto* failure = reported()) fail(*failure);
  auto late = collective.failure(FailureReason::timeout, cause.culprit);
  late.reporter = cause.reporter;
  late.rows = rows;
  late.waited_ms = options_.timeout.count();
  fail(late);
}

Communicator::RootCause Communicator::find_root_cause(int peer) {
  query_out_ = {.token = token_};
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && !worker_->broken(r))
      worker_->send(r, wait_query_tag(token_, rank(), false), &query_out_, sizeof(WaitQuery), peers_[r].query_sent);
  }
  progress_for(kQueryTimeout, [&] { return reported() || trace_waits(peer).known; });
  return trace_waits(peer);
}

Communicator::RootCause Communicator::trace_waits(int peer) const {
  RootCause cause{.culprit = peer, .reporter = rank(), .known = false};
  for (int step = 0; step < size(); ++step) {
    const auto& late = peers_[cause.culprit];
    if (worker_->broken(cause.culprit)) return {cause.culprit, cause.reporter, true};
    if (!late.reply_received.done() || late.reply_in.token != token_) return cause;
    const int next = late.reply_in.waits_for;
    if (next < 0 || next >= size()) return {cause.culprit, cause.reporter, true};
    if (next == rank()) break;
    cause = {.culprit = next, .reporter = cause.culprit, .known = false};
  }
  return {peer, rank(), true};  // a cycle
}

/// The peer may have left because of another failure, and its notice may still be in flight. Without a notice, the
/// connection that broke first identifies the rank that is gone.
void Communicator::fail_disconnected(const Failure& failure) {
  progress_for(kNoticeWait, [&] { return reported() != nullptr; });
  if (const auto* report = reported()) fail(*report);
  auto lost = failure;
  for (const auto& collective : collectives_) {
    for (int r = 0; collective.open() && r < size(); ++r) {
      const bool earlier = !worker_->broken(lost.peer) || worker_->broke_at(r) < worker_->broke_at(lost.peer);
      if (!collective.completed(r) && worker_->broken(r) && earlier)
        lost = collective.failure(FailureReason::connection_lost, r);
    }
  }
  fail(lost);
}

void Communicator::wait_rows(CollectiveState& collective, int from, int64_t rows) {
  wait(collective, from, rows, [&] { return collective.arrived(from) >= rows; });
}

void Communicator::finish(CollectiveState& collective) {
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    wait(collective, peer, collective.header().rows, [&] { return collective.completed(peer); });
  }
  collective.close();
}

void Communicator::abandon(const CollectiveState& collective) noexcept {
  if (!failure_) broadcast_failure(collective.failure(FailureReason::abandoned, rank()));
}

void Communicator::fail(const Failure& failure) {
  broadcast_failure(failure);
  throw_failed();
}

void Communicator::throw_failed() const {
  C10_THROW_ERROR(DistError, c10::str(text(*failure_), " Group '", options_.group,
                                      "' cannot be used any more: destroy it and create a new one."));
}

void Communicator::broadcast_failure(const Failure& failure) {
  failure_ = failure;
  worker_->skip_flush();  // the exchange of notices below has its own time limit
  notice_out_ = {token_, failure};
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && !worker_->broken(r))
      worker_->send(r, notice_tag(token_, rank()), &notice_out_, sizeof(Notice), peers_[r].notice_sent);
  }
  progress_for(kNoticeFlush, [&] {
    for (int r = 0; r < size(); ++r)
      if (!is_notified(r)) return false;
    return true;
  });
}

bool Communicator::is_notified(int r) const {
  const bool is_culprit = r == failure_->peer && failure_->reason != FailureReason::mismatch;
  return r == rank() || is_culprit || worker_->broken(r) ||
         (peers_[r].notice_sent.done() && peers_[r].notice_received.done());
}

}  // namespace weft::comm::ucx
