#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "weft/comm/exchange.h"

namespace weft::overlap {

/// The other ranks, the next one first.
inline std::vector<int> peers(const comm::Link& link) {
  std::vector<int> list;
  for (int i = 1; i < link.size(); ++i) list.push_back((link.rank() + i) % link.size());
  return list;
}

/// x with rows that have no gaps.
inline at::Tensor whole_rows(const at::Tensor& x) { return x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous(); }

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

/// A round of blocks [rows, columns] that are summed. They travel as rows or as squares of 32 x 32 (kernels/pieces.h).
class SumRound {
 public:
  SumRound(comm::Link& link, int64_t rows, int64_t columns, at::ScalarType dtype, bool squares)
      : rows_(rows),
        high_(squares ? kSide : 1),
        wide_((columns + kSide - 1) / kSide),
        round_(squares ? link.reduce_scatter(count(rows), wide_ * kSide * kSide, dtype)
                       : link.reduce_scatter(rows, columns, dtype)) {}

  at::Tensor outgoing(int to) { return shaped(round_->outgoing(to)); }
  at::Tensor incoming(int from) { return shaped(round_->incoming(from)); }
  /// Rows [0, rows) of the block for `to` are final.
  void publish(int to, int64_t rows) { round_->publish(to, rows == rows_ ? count(rows) : rows / high_); }
  /// How many rows of every peer's block are there; waits for row `from` if it is not.
  int64_t arrived_from_all(const std::vector<int>& peers, int64_t from) {
    return std::min(rows_, high_ * overlap::arrived_from_all(*round_, peers, from / high_, count(rows_)));
  }
  void wait(int from) { round_->wait(from, count(rows_)); }
  void advance() { round_->advance(); }
  void finish() { round_->finish(); }

 private:
  static constexpr int64_t kSide = 32;
  int64_t count(int64_t rows) const { return (rows + high_ - 1) / high_; }
  at::Tensor shaped(const at::Tensor& block) const {
    return high_ == 1 ? block : block.view({wide_, count(rows_), kSide, kSide});
  }

  int64_t rows_, high_;  // rows of a block; rows that are published together
  int64_t wide_;         // squares side by side
  std::unique_ptr<comm::Exchange> round_;
};

}  // namespace weft::overlap
