#pragma once
#include <algorithm>
#include <vector>

#include "weft/comm/exchange.h"

namespace weft::overlap {

/// The other ranks, the next one first.
inline std::vector<int> peers(const comm::Link& link) {
  std::vector<int> list;
  for (int i = 1; i < link.size(); ++i) list.push_back((link.rank() + i) % link.size());
  return list;
}

/// How many rows of every peer's block are there; waits for row `from` if it is not.
inline int64_t arrived_from_all(comm::Exchange& round, const std::vector<int>& peers, int64_t from, int64_t rows) {
  int64_t least = rows;
  for (const int peer : peers) {
    auto there = round.arrived(peer);
    if (there <= from) {
      round.wait(peer, from + 1);
      there = std::max(from + 1, round.arrived(peer));
    }
    least = std::min(least, there);
  }
  return least;
}

}  // namespace weft::overlap
