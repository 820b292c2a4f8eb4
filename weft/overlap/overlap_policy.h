#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "weft/overlap/costs.h"

namespace weft::overlap {

/// Decides for each call whether a linear overlaps its communication with its GEMMs. Keeps the last decision, its
/// prediction and the measured time for `explain()`.
class OverlapPolicy {
 public:
  /// The transport to use; null: use plain collectives. `requested`: true overlaps whenever the group has a transport;
  /// unset, only if the predicted time is shorter. Every rank decides the same.
  std::shared_ptr<comm::Transport> select(const std::string& group, const OverlapShape& shape,
                                          std::optional<bool> requested) const;

  /// Measures a call: construct it at the start and destroy it at the end.
  class ScopedTimer {
   public:
    explicit ScopedTimer(const OverlapPolicy& policy);
    ScopedTimer(const ScopedTimer&) = delete;
    ScopedTimer& operator=(const ScopedTimer&) = delete;
    ~ScopedTimer();

   private:
    const OverlapPolicy& policy_;
    double start_;
  };

  /// "2 x 512 rows: overlapped over shm; predicted 1.200 ms (plain 1.900 ms); took 1.250 ms". Empty before the first
  /// call.
  std::string last_decision() const;

 private:
  struct Decision {
    OverlapShape shape;
    std::string detail;  // name of the transport, or the reason for plain collectives
    bool overlapped = false;
    std::optional<Prediction> predicted;
    double elapsed = 0;
    std::thread::id thread = std::this_thread::get_id();  // thread of the call
  };
  /// Mutable state behind a pointer: the policy belongs to a plan, which is immutable.
  struct Log {
    std::mutex mutex;
    std::optional<Decision> decision;
  };

  const std::unique_ptr<Log> log_ = std::make_unique<Log>();
};

}  // namespace weft::overlap
