#include "weft/comm/ucx/channel.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "weft/comm/ucx/rendezvous.h"

namespace weft::comm::ucx {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::chrono::microseconds kBetweenLooks{50};  // while computing: a look costs a system call
constexpr int kIdleLooks = 64;                          // before the thread sleeps
constexpr milliseconds kLongestNap{50};                 // so that time limits are seen
constexpr milliseconds kFarewell{300};                  // for notices to go round

}  // namespace

Channel::Channel(UcxOptions options, std::nullptr_t) : options_(std::move(options)), peers_(options_.size) {}

Channel::Channel(const UcxOptions& options) : Channel(options, nullptr) {
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "ucx link: timeout is ", options.timeout.count(),
                    " ms, expected more than 0.");
  TORCH_CHECK_VALUE(size() <= kMostRanks, "ucx link: ", size(), " ranks, expected at most ", kMostRanks, ".");
  const auto all = introduce(options, [&] {
    worker_ = std::make_unique<Worker>(size());
    return worker_->address();
  });
  token_ = all.token;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    worker_->connect(r, all.addresses[r]);
    worker_->receive(notice_tag(token_, r), &peers_[r].notice_in, sizeof(Notice), peers_[r].notice_received);
  }
  finish(begin({.token = token_, .rows = kFormat}, {}));  // a greeting: a round without data
  forget(options, all);
}

Channel::~Channel() {
  if (!worker_) return;
  for (auto& round : rounds_) round.cancel();
  for (auto& peer : peers_) worker_->cancel_receive(peer.notice_received);
}

Round& Channel::start(const Agreement& agreement, const at::Tensor& mine) {
  if (failure_) refuse();
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
  for (auto& round : rounds_) {
    if (!round.open()) continue;
    if (const auto failure = round.pump()) fail(*failure);
    for (int r = 0; r < size(); ++r) {
      if (round.settled(r)) continue;
      const auto& peer = peers_[r];
      if (peer.notice_received.done() && peer.notice_in.token == token_) fail(peer.notice_in.failure);
      if (worker_->broken(r)) fail(round.failure(Reason::lost, r));
    }
  }
}

void Channel::wait(const Round& round, int peer, int64_t rows, const std::function<bool()>& done) {
  const auto deadline = Clock::now() + options_.timeout;
  for (int idle = 0;;) {
    look_for_trouble();
    if (done()) return;
    idle = worker_->progress() ? 0 : idle + 1;
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) {
      auto late = round.failure(Reason::timeout, peer);
      late.rows = rows;
      late.waited_ms = options_.timeout.count();
      fail(late);
    }
    if (idle > kIdleLooks) worker_->sleep(std::min(left, kLongestNap));
  }
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
  const auto deadline = Clock::now() + kFarewell;
  for (int r = 0; r < size(); ++r) {
    while (!has_heard(r) && Clock::now() < deadline) {
      if (!worker_->progress()) worker_->sleep(milliseconds(1));
    }
  }
}

bool Channel::has_heard(int r) const {
  return r == rank() || worker_->broken(r) || (peers_[r].notice_sent.done() && peers_[r].notice_received.done());
}

}  // namespace weft::comm::ucx
