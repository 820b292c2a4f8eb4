#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "weft/overlap/costs.h"

namespace weft::overlap {

/// Decides, call by call, whether a linear's communication goes under its products, and remembers for `explain()` what
/// it decided last, what it had predicted and what it took.
class OverlapPolicy {
 public:
  /// The link to overlap on; null: take the plain path. `requested`: true overlaps wherever there is a link, none where
  /// the prediction says that it pays. Every rank decides the same.
  std::shared_ptr<comm::Transport> select(const std::string& group, const OverlapShape& shape,
                                          std::optional<bool> requested) const;

  /// Measures one call from here on; to be kept until it ends.
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

  /// "2 x 512 rows: overlapped by shm, predicted 1.20 ms (plain 1.90 ms), took 1.25 ms"; empty before the first call.
  std::string last_decision() const;

 private:
  struct Decision {
    OverlapShape shape;
    std::string detail;  // the link's name, or why none
    bool overlapped = false;
    std::optional<Prediction> predicted;
    double elapsed = 0;
    std::thread::id thread = std::this_thread::get_id();  // that made the call
  };
  /// What changes from call to call. It lies outside the choice, which is part of a plan and so never changes.
  struct Log {
    std::mutex mutex;
    std::optional<Decision> decision;
  };
  void record(Decision decision) const;

  const std::unique_ptr<Log> log_ = std::make_unique<Log>();
};

}  // namespace weft::overlap
