#pragma once
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "weft/comm/ucx/collective_state.h"
#include "weft/comm/ucx/wire.h"
#include "weft/comm/ucx/worker.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::comm::ucx {

/// This rank's connections to the others of its group, and the rounds that run over them. After a failure, here or on
/// another rank, everything raises.
class Communicator {
 public:
  /// Meets the other ranks through the Store and greets them over the network.
  explicit Communicator(const UcxOptions& options);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }

  /// The next round. `local` may be undefined, see `CollectiveState::start`.
  CollectiveState& start(const CollectiveFingerprint& fingerprint, const at::Tensor& local);
  /// Moves bytes, then looks for trouble.
  void progress();
  /// The same, unless it was done a moment ago.
  void progress_throttled();
  /// Until `rows` rows of the block of `from` are there.
  void wait_rows(CollectiveState& collective, int from, int64_t rows);
  /// Until every block is where it belongs. The round is over then.
  void finish(CollectiveState& collective);
  /// A round that will never be finished: the group cannot go on. Raises nothing.
  void abandon(const CollectiveState& collective) noexcept;

 private:
  struct PeerMessages {
    Notice notice_in{};
    Transfer notice_sent, notice_received;
    WaitQuery query_in{}, reply_in{}, reply_out{};
    Transfer query_sent, query_received, reply_sent, reply_received;
  };
  Communicator(UcxOptions options, std::nullptr_t);  // not connected: if connecting raises, the destructor runs
  CollectiveState& begin(const Header& header, const at::Tensor& local);
  void post_receives(int peer);
  void check_for_failures();
  /// The failure that a peer has reported, if one has.
  const Failure* reported() const;
  /// Answers peers that ask whom this rank waits for.
  void reply_to_queries();
  /// Until `done`, which is up to `peer`; `rows` are told at the timeout.
  void wait(const CollectiveState& collective, int peer, int64_t rows, const std::function<bool()>& done);
  [[noreturn]] void fail_timeout(const CollectiveState& collective, int peer, int64_t rows);
  [[noreturn]] void fail_disconnected(const Failure& failure);
  [[noreturn]] void fail(const Failure& failure);
  /// Who keeps everybody waiting, and who waits for it.
  struct RootCause {
    int culprit;
    int reporter;
    bool known;  // false: the culprit has not answered
  };
  /// Asks all peers whom they wait for and follows the answers, from `peer` on.
  RootCause find_root_cause(int peer);
  /// By the answers that have come: to a rank that has not answered, is gone, or waits for nobody.
  RootCause trace_waits(int peer) const;
  /// Moves bytes for so long, until `done`.
  void progress_for(std::chrono::milliseconds max_wait, const std::function<bool()>& done);
  /// Notes the failure, tells the peers, and gives all a moment to learn of it.
  void broadcast_failure(const Failure& failure);
  [[noreturn]] void throw_failed() const;
  /// The peer knows of our failure and we of its, or it is gone or to blame.
  bool is_notified(int peer) const;

  UcxOptions options_;
  Token token_{};
  uint64_t seq_ = 0;
  std::chrono::steady_clock::time_point last_progress_;
  std::optional<Failure> failure_;
  int waits_for_ = WaitQuery::kNone;
  Notice notice_out_{};
  WaitQuery query_out_{};
  std::vector<PeerMessages> peers_;
  std::array<CollectiveState, 2> collectives_;
  std::unique_ptr<Worker> worker_;  // last: ends before the memory its messages lie in
};

}  // namespace weft::comm::ucx
