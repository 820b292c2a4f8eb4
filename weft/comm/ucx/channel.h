#pragma once
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "weft/comm/ucx/round.h"
#include "weft/comm/ucx/wire.h"
#include "weft/comm/ucx/worker.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::comm::ucx {

/// This rank's connections to the others of its group, and the rounds that run over them. After a failure, here or on
/// another rank, everything raises.
class Channel {
 public:
  /// Meets the other ranks through the Store and greets them over the network.
  explicit Channel(const UcxOptions& options);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel();

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }

  /// The next round. `mine` may be undefined, see `Round::start`.
  Round& start(const Agreement& agreement, const at::Tensor& mine);
  /// Moves bytes, then looks for trouble.
  void advance();
  /// The same, unless it was done a moment ago.
  void advance_now_and_then();
  /// Until `rows` rows of the block of `from` are there.
  void wait_rows(Round& round, int from, int64_t rows);
  /// Until every block is where it belongs. The round is over then.
  void finish(Round& round);
  /// A round that will never be finished: the group cannot go on. Raises nothing.
  void abandon(const Round& round) noexcept;

 private:
  struct Peer {
    Notice notice_in{};
    Transfer notice_sent, notice_received;
    Inquiry question_in{}, answer_in{}, answer_out{};
    Transfer question_sent, question_received, answer_sent, answer_received;
  };
  Channel(UcxOptions options, std::nullptr_t);  // not connected: if connecting raises, the destructor runs
  Round& begin(const Header& header, const at::Tensor& mine);
  void expect_messages(int peer);
  void look_for_trouble();
  /// The failure that a peer has reported, if one has.
  const Failure* reported() const;
  /// Answers peers that ask whom this rank waits for.
  void answer_questions();
  /// Until `done`, which is up to `peer`; `rows` are told at the timeout.
  void wait(const Round& round, int peer, int64_t rows, const std::function<bool()>& done);
  [[noreturn]] void fail_late(const Round& round, int peer, int64_t rows);
  [[noreturn]] void fail_lost(const Failure& failure);
  [[noreturn]] void fail(const Failure& failure);
  /// Who keeps everybody waiting, and who waits for it.
  struct Blame {
    int culprit;
    int finder;
    bool known;  // false: the culprit has not answered
  };
  /// Asks all peers whom they wait for and follows the answers, from `peer` on.
  Blame find_culprit(int peer);
  /// By the answers that have come: to a rank that has not answered, is gone, or waits for nobody.
  Blame follow(int peer) const;
  /// Moves bytes for so long, until `done`.
  void progress_for(std::chrono::milliseconds longest, const std::function<bool()>& done);
  /// Notes the failure, tells the peers, and gives all a moment to learn of it.
  void give_up(const Failure& failure);
  [[noreturn]] void refuse() const;
  /// The peer knows of our failure and we of its, or it is gone or to blame.
  bool has_heard(int peer) const;

  UcxOptions options_;
  Token token_{};
  uint64_t epoch_ = 0;
  std::chrono::steady_clock::time_point advanced_;
  std::optional<Failure> failure_;
  int waits_for_ = Inquiry::kNobody;
  Notice notice_out_{};
  Inquiry question_out_{};
  std::vector<Peer> peers_;
  std::array<Round, 2> rounds_;
  std::unique_ptr<Worker> worker_;  // last: ends before the memory its messages lie in
};

}  // namespace weft::comm::ucx
