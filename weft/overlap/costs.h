#pragma once
#include <string>

#include "weft/comm/group.h"
#include "weft/comm/transport.h"

namespace weft::overlap {

/// What products and messages cost on the ranks of a group. All ranks must use the same numbers, since what they decide
/// by them must be the same.
struct Costs {
  double per_flop = 0;      // s; of a product of many rows
  double per_weight = 0;    // s per value of the weight, each time that a block of rows meets it
  double latency = 0;       // s until a peer sees what was published
  double per_byte = 0;      // s per byte on its way
  double cpu_per_byte = 0;  // s that this core gives per byte it sends, receives or reads in a peer's memory
  double plain_latency = 0;
  double plain_per_byte = 0;  // the same two of a collective of c10d

  /// Of `rows` rows, k long, by a weight of n columns.
  double gemm(int64_t rows, int64_t n, int64_t k) const;
};

/// The communication of one linear and the product it belongs to.
struct OverlapShape {
  comm::CommOp op = comm::CommOp::all_gather;
  at::ScalarType dtype = at::kFloat;
  int64_t rows = 0;  // of one rank's block
  int64_t n = 0, k = 0;
  int ranks = 1;

  /// Bytes that each rank gets, and gives.
  double bytes() const;
};

/// Seconds.
struct Prediction {
  double overlapped = 0, plain = 0;
};

/// plain       T = product + latency + V/rate
/// in place    T = product + latency + V·cpu            (what arrives is read where it lies)
/// network     T = max(product + V·cpu, V/rate + product of the last block), each block of rows meeting the weight anew
/// An all-reduce moves V twice.
Prediction predict(const OverlapShape& shape, const Costs& costs, bool zero_copy);

/// Empty if overlapping pays: a network must gain 15 %, memory anything. Otherwise why not.
std::string rejection_reason(const OverlapShape& shape, const Prediction& predicted, bool zero_copy);

/// Measured once for each group and dtype, by all its ranks together, and kept; or as `set_costs` said.
Costs costs(const std::shared_ptr<comm::Transport>& transport, const comm::Group& group, const std::string& name,
            at::ScalarType dtype);
/// For a group, by name, from now on. To be called with the same numbers on every rank.
void set_costs(const std::string& group, const Costs& costs);

}  // namespace weft::overlap
