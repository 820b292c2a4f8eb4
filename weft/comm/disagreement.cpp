#include "weft/comm/disagreement.h"

#include <algorithm>

#include "weft/comm/agreement.h"

namespace weft::comm {

std::string disagreement(c10::ArrayRef<Statement> by_rank) {
  constexpr size_t kShown = 8;
  std::vector<Statement> kinds;
  std::string list;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto& said = by_rank[rank];
    if (std::find(kinds.begin(), kinds.end(), said) != kinds.end()) continue;
    kinds.push_back(said);
    if (kinds.size() > kShown) continue;
    list += (list.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + text(said.about) +
            " (its collective " + std::to_string(said.number) + ")";
  }
  return kinds.size() > 1 ? list : std::string();
}

}  // namespace weft::comm
