#pragma once
#include <string>

#include "weft/comm/group.h"
#include "weft/comm/transport.h"

namespace weft::overlap {

/// Measured costs of GEMMs and messages, in seconds. All ranks of a group must use the same values, because all must
/// make the same decision.
struct Costs {
  double per_flop = 0;        // of a GEMM with many rows
  double per_weight = 0;      // per weight value, for each pass of a GEMM over the weight
  double per_chunk = 0;       // per weight value, for each further chunk of rows of one GEMM: 0 on AMX
  double latency = 0;         // of a one-value all-gather over the transport
  double per_byte = 0;        // transfer time over the transport
  double cpu_per_byte = 0;    // CPU time to send and receive a byte, or to read it in a peer's memory
  double plain_latency = 0;   // latency of the group's c10d collectives
  double plain_per_byte = 0;  // per_byte of the group's c10d collectives

  /// Seconds of a GEMM [rows, k] x [k, n].
  double gemm(int64_t rows, int64_t n, int64_t k) const;
};

/// The collective of a linear and the GEMM it overlaps with.
struct OverlapShape {
  comm::CommOp op = comm::CommOp::all_gather;
  at::ScalarType dtype = at::kFloat;
  int64_t rows = 0;  // of one rank's block
  int64_t n = 0, k = 0;
  int ranks = 1;

  /// Bytes that each rank sends, and receives.
  double bytes() const;
};

/// Predicted seconds.
struct Prediction {
  double overlapped = 0, plain = 0;
};

/// With V bytes received by each rank:
///   plain       T = gemm + plain_latency + V plain_per_byte
///   zero-copy   T = gemm + (ranks - 1) N K per_chunk + latency + V cpu_per_byte   (blocks are read in peers' memory)
///   network     T = max(gemm + reloads + V cpu_per_byte, latency + V per_byte + gemm of the last block)
/// `reloads`: the extra passes over the weight, since rows arrive in blocks. An all-reduce moves V twice.
Prediction predict(const OverlapShape& shape, const Costs& costs, bool zero_copy);

/// Empty if the call should overlap, otherwise the reason. Overlapping must save at least 15 % over a network; with
/// zero-copy it must not be slower.
std::string rejection_reason(const OverlapShape& shape, const Prediction& predicted, bool zero_copy);

/// N and K of the GEMMs that `costs` times. At 768 a rank computes 8 GFLOP, at 192 0.5: a CPU that takes more than 3 ms
/// for 64 rows at 192 (`probe`, in seconds), such as an emulator, would take at least 5 seconds at 768.
inline constexpr int64_t kFastWidth = 768, kSlowWidth = 192;
int64_t timed_width(double probe);

/// Measured once per transport and dtype, in a collective call; later calls return the same values.
Costs costs(const std::shared_ptr<comm::Transport>& transport, const comm::Group& group, at::ScalarType dtype);

}  // namespace weft::overlap
