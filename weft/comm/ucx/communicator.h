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

/// This rank's connections to the other ranks of its group, and the collectives that use them. After a failure on any
/// rank every call raises.
class Communicator {
 public:
  /// Exchanges addresses through the Store, connects to the other ranks and runs one empty collective.
  explicit Communicator(const UcxOptions& options);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }

  /// Starts the next collective. `local` may be undefined, see `CollectiveState::start`.
  CollectiveState& start(const CollectiveFingerprint& fingerprint, const at::Tensor& local);
  /// Progresses UCX, then raises if any rank has failed.
  void progress();
  /// The same, at most once per kProgressInterval.
  void progress_throttled();
  /// Waits until `rows` rows of the block of `from` have arrived.
  void wait_rows(CollectiveState& collective, int from, int64_t rows);
  /// Waits until all blocks are sent and received, then closes the collective.
  void finish(CollectiveState& collective);
  /// Fails the group because the collective will not be finished. Does not raise.
  void abandon(const CollectiveState& collective) noexcept;

 private:
  struct PeerMessages {
    Notice notice_in{};
    Transfer notice_sent, notice_received;
    WaitQuery query_in{}, reply_in{}, reply_out{};
    Transfer query_sent, query_received, reply_sent, reply_received;
  };
  Communicator(UcxOptions options, std::nullptr_t);  // delegate: if connecting raises, the destructor still runs
  CollectiveState& begin(const Header& header, const at::Tensor& local);
  void post_receives(int peer);
  void check_for_failures();
  /// The failure that a peer has reported, or null.
  const Failure* reported() const;
  /// Tells peers that have asked which rank this one waits for.
  void reply_to_queries();
  /// Waits for `peer` until `done`. `rows` is for the timeout error.
  void wait(const CollectiveState& collective, int peer, int64_t rows, const std::function<bool()>& done);
  [[noreturn]] void fail_timeout(const CollectiveState& collective, int peer, int64_t rows);
  [[noreturn]] void fail_disconnected(const Failure& failure);
  [[noreturn]] void fail(const Failure& failure);
  /// The rank that blocks the collective, and a rank that waits for it.
  struct RootCause {
    int culprit;
    int reporter;
    bool known;  // false: the culprit has not replied yet
  };
  /// Asks all peers which rank they wait for and follows the replies, starting at `peer`.
  RootCause find_root_cause(int peer);
  /// Follows the replies received so far to a rank that has not replied, is disconnected, or waits for no rank.
  RootCause trace_waits(int peer) const;
  /// Progresses UCX until `done`, for at most `max_wait`.
  void progress_for(std::chrono::milliseconds max_wait, const std::function<bool()>& done);
  /// Stores the failure, sends it to the peers and waits briefly for their notices.
  void broadcast_failure(const Failure& failure);
  [[noreturn]] void throw_failed() const;
  /// Notices were exchanged with the peer, or none can be expected: it is disconnected or caused the failure.
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
  std::unique_ptr<Worker> worker_;  // last member: destroyed before the buffers of its messages
};

}  // namespace weft::comm::ucx
