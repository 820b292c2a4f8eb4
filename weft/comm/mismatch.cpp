#include "weft/comm/mismatch.h"

#include <algorithm>

#include "weft/comm/collective_fingerprint.h"

namespace weft::comm {

std::string describe_mismatch(c10::ArrayRef<SequencedFingerprint> by_rank) {
  constexpr size_t kMaxShown = 8;
  std::vector<SequencedFingerprint> distinct;
  std::string list;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto& entry = by_rank[rank];
    if (std::find(distinct.begin(), distinct.end(), entry) != distinct.end()) continue;
    distinct.push_back(entry);
    if (distinct.size() > kMaxShown) continue;
    list += (list.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + text(entry.fingerprint) +
            " (its collective " + std::to_string(entry.seq) + ")";
  }
  return distinct.size() > 1 ? list : std::string();
}

}  // namespace weft::comm
