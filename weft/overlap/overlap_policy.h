#pragma once
#include <memory>
#include <optional>
#include <string>

#include "weft/overlap/costs.h"

namespace weft::overlap {

/// Whether one call of a linear overlaps its communication with its GEMMs, and why.
struct OverlapDecision {
  OverlapShape shape;
  std::shared_ptr<comm::Transport> transport = {};  // null: use plain collectives
  std::string rejection = {};                       // why
  std::optional<Prediction> predicted = {};

  /// "2 x 512 rows: overlapped over shm; predicted 1.200 ms (plain 1.900 ms); took 1.250 ms", with the measured
  /// seconds.
  std::string text(double elapsed) const;
};

/// `requested`: true overlaps whenever the group has a transport; unset, only if the predicted time is shorter. Every
/// rank decides the same.
OverlapDecision decide_overlap(const std::string& group, const OverlapShape& shape, std::optional<bool> requested);

}  // namespace weft::overlap
