#include "weft/comm/ucx/channel.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "weft/comm/interrupt.h"
#include "weft/comm/ucx/devices.h"
#include "weft/comm/ucx/rendezvous.h"

namespace weft::comm::ucx {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::chrono::microseconds kBetweenLooks{50};  // while computing: a look costs a system call
constexpr int kIdleLooks = 64;                          // before the thread sleeps
constexpr milliseconds kLongestNap{50};                 // so that time limits are seen
constexpr milliseconds kFarewell{300};                  // for notices to go round
constexpr milliseconds kInquiry{300};                   // for answers; a rank that waits answers at once
constexpr milliseconds kHearing{150};                   // for the notice of a peer whose connection broke

}  // namespace

Channel::Channel(UcxOptions options, std::nullptr_t) : options_(std::move(options)), peers_(options_.size) {}

Channel::Channel(const UcxOptions& options) : Channel(options, nullptr) {
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "ucx link: timeout is ", options.timeout.count(),
                    " ms, expected more than 0.");
  TORCH_CHECK_VALUE(size() <= kMostRanks, "ucx link: ", size(), " ranks, expected at most ", kMostRanks, ".");
  const auto all = introduce(options, [&] {
    worker_ = std::make_unique<Worker>(size(), net_devices(options.store));
    return worker_->address();
  });
  token_ = all.token;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    worker_->connect(r, all.addresses[r]);
    expect_messages(r);
  }
  finish(begin({.token = token_, .rows = kFormat}, {}));  // a greeting: a round without data
  forget(options, all);
}

Channel::~Channel() {
  if (!worker_) return;
  for (auto& round : rounds_) round.cancel();
  for (auto& peer : peers_) {
    for (auto* transfer : {&peer.notice_received, &peer.question_received, &peer.answer_received})
      worker_->cancel_receive(*transfer);
  }
}

void Channel::expect_messages(int r) {
  auto& peer = peers_[r];
  worker_->receive(notice_tag(token_, r), &peer.notice_in, sizeof(Notice), peer.notice_received);
  worker_->receive(inquiry_tag(token_, r, false), &peer.question_in, sizeof(Inquiry), peer.question_received);
  worker_->receive(inquiry_tag(token_, r, true), &peer.answer_in, sizeof(Inquiry), peer.answer_received);
}

Round& Channel::start(const Agreement& agreement, const at::Tensor& mine) {
  // What a peer reported is read before anything is sent: to a peer that is gone that would fail with less to tell.
  for (int i = 0; i < kIdleLooks && worker_->progress(); ++i) {
  }
  look_for_trouble();
  return begin(header(token_, ++epoch_, agreement), mine);
}

Round& Channel::begin(const Header& header, const at::Tensor& mine) {
  auto* const round = std::find_if(rounds_.begin(), rounds_.end(), [](const Round& r) { return !r.open(); });
  TORCH_CHECK(round != rounds_.end(), "ucx link of group '", options_.group,
              "': two rounds are open; finish one before a third.");
  round->start(*worker_, rank(), size(), header, mine);
  return *round;
}

void Channel::advance() {
  worker_->progress();
  look_for_trouble();
  advanced_ = Clock::now();
}

void Channel::advance_now_and_then() {
  if (Clock::now() - advanced_ >= kBetweenLooks) advance();
}

void Channel::look_for_trouble() {
  if (failure_) refuse();
  answer_questions();
  if (const auto* failure = reported()) fail(*failure);
  for (auto& round : rounds_) {
    if (!round.open()) continue;
    if (const auto failure = round.pump()) failure->reason == Reason::lost ? fail_lost(*failure) : fail(*failure);
    for (int r = 0; r < size(); ++r)
      if (!round.settled(r) && worker_->broken(r)) fail_lost(round.failure(Reason::lost, r));
  }
}

const Failure* Channel::reported() const {
  for (const auto& peer : peers_)
    if (peer.notice_received.done() && peer.notice_in.token == token_) return &peer.notice_in.failure;
  return nullptr;
}

void Channel::answer_questions() {
  for (int r = 0; r < size(); ++r) {
    auto& peer = peers_[r];
    const bool asked = peer.question_received.done() && peer.question_in.token == token_;
    if (!asked || peer.answer_sent.state != Transfer::State::none || worker_->broken(r)) continue;
    peer.answer_out = {token_, 1, waits_for_};
    worker_->send(r, inquiry_tag(token_, rank(), true), &peer.answer_out, sizeof(Inquiry), peer.answer_sent);
  }
}

void Channel::wait(const Round& round, int peer, int64_t rows, const std::function<bool()>& done) {
  struct Waiting {
    int& whom;
    ~Waiting() { whom = Inquiry::kNobody; }
  } const waiting{waits_for_};
  waits_for_ = peer;
  const auto deadline = Clock::now() + options_.timeout;
  for (int idle = 0;;) {
    look_for_trouble();
    if (done()) return;
    idle = worker_->progress() ? 0 : idle + 1;
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) fail_late(round, peer, rows);
    if (idle <= kIdleLooks) continue;
    check_interrupt();
    worker_->sleep(std::min(left, kLongestNap));
  }
}

void Channel::progress_for(milliseconds longest, const std::function<bool()>& done) {
  const auto deadline = Clock::now() + longest;
  while (!done() && Clock::now() < deadline) {
    if (!worker_->progress()) worker_->sleep(milliseconds(1));
    answer_questions();
  }
}

/// A peer that is late may be waiting itself, for one that is gone: that one is named.
void Channel::fail_late(const Round& round, int peer, int64_t rows) {
  const auto blame = find_culprit(peer);
  if (const auto* failure = reported()) fail(*failure);
  auto late = round.failure(Reason::timeout, blame.culprit);
  late.finder = blame.finder;
  late.rows = rows;
  late.waited_ms = options_.timeout.count();
  fail(late);
}

Channel::Blame Channel::find_culprit(int peer) {
  question_out_ = {.token = token_};
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && !worker_->broken(r))
      worker_->send(r, inquiry_tag(token_, rank(), false), &question_out_, sizeof(Inquiry), peers_[r].question_sent);
  }
  progress_for(kInquiry, [&] { return reported() || follow(peer).known; });
  return follow(peer);
}

Channel::Blame Channel::follow(int peer) const {
  Blame blame{.culprit = peer, .finder = rank(), .known = false};
  for (int step = 0; step < size(); ++step) {
    const auto& late = peers_[blame.culprit];
    if (worker_->broken(blame.culprit)) return {blame.culprit, blame.finder, true};
    if (!late.answer_received.done() || late.answer_in.token != token_) return blame;
    const int next = late.answer_in.waits_for;
    if (next < 0 || next >= size()) return {blame.culprit, blame.finder, true};
    if (next == rank()) break;
    blame = {.culprit = next, .finder = blame.culprit, .known = false};
  }
  return {peer, rank(), true};  // they wait for each other
}

/// A peer that had to give up may have left, and its notice may still be on its way. Else the connection that broke
/// first was to the rank that is gone.
void Channel::fail_lost(const Failure& failure) {
  progress_for(kHearing, [&] { return reported() != nullptr; });
  if (const auto* told = reported()) fail(*told);
  auto lost = failure;
  for (const auto& round : rounds_) {
    for (int r = 0; round.open() && r < size(); ++r) {
      const bool earlier = !worker_->broken(lost.peer) || worker_->broke_at(r) < worker_->broke_at(lost.peer);
      if (!round.settled(r) && worker_->broken(r) && earlier) lost = round.failure(Reason::lost, r);
    }
  }
  fail(lost);
}

void Channel::wait_rows(Round& round, int from, int64_t rows) {
  wait(round, from, rows, [&] { return round.arrived(from) >= rows; });
}

void Channel::finish(Round& round) {
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    wait(round, peer, round.header().rows, [&] { return round.settled(peer); });
  }
  round.close();
}

void Channel::abandon(const Round& round) noexcept {
  if (!failure_) give_up(round.failure(Reason::abandoned, rank()));
}

void Channel::fail(const Failure& failure) {
  give_up(failure);
  refuse();
}

void Channel::refuse() const {
  C10_THROW_ERROR(DistError, c10::str(text(*failure_), " Group '", options_.group, "' cannot be used any more."));
}

void Channel::give_up(const Failure& failure) {
  failure_ = failure;
  notice_out_ = {token_, failure};
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && !worker_->broken(r))
      worker_->send(r, notice_tag(token_, rank()), &notice_out_, sizeof(Notice), peers_[r].notice_sent);
  }
  progress_for(kFarewell, [&] {
    for (int r = 0; r < size(); ++r)
      if (!has_heard(r)) return false;
    return true;
  });
}

bool Channel::has_heard(int r) const {
  const bool to_blame = r == failure_->peer && failure_->reason != Reason::disagreement;
  return r == rank() || to_blame || worker_->broken(r) ||
         (peers_[r].notice_sent.done() && peers_[r].notice_received.done());
}

}  // namespace weft::comm::ucx
