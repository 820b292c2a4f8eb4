#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>

namespace weft::comm {

enum class CommOp : uint32_t { all_gather = 1, reduce_scatter, all_reduce, barrier, put_signal, wait_signal };

/// What all ranks compare before a collective moves data.
struct CollectiveFingerprint {
  CommOp op = CommOp::all_gather;
  at::ScalarType dtype = at::kFloat;
  int64_t rows = 0;     // of one rank's block
  int64_t columns = 0;  // of a row
  bool operator==(const CollectiveFingerprint&) const = default;
};

/// A running collective: this rank has a block [rows, columns] for each peer and gets one from each. Rows become ready
/// from first to last. For one thread. Only `wait` and `finish` block; they raise at the timeout, if a peer has failed,
/// or if its fingerprint differs.
class InFlightCollective {
 public:
  InFlightCollective() = default;
  InFlightCollective(const InFlightCollective&) = delete;
  InFlightCollective& operator=(const InFlightCollective&) = delete;
  /// Destroying an unfinished collective fails the group.
  virtual ~InFlightCollective() = default;

  /// Memory for this rank's block for rank `to`. An all-gather has one block for all ranks.
  virtual at::Tensor outgoing(int to) = 0;
  /// Rows [0, rows) of the block for `to` are final.
  virtual void mark_ready(int to, int64_t rows) = 0;
  /// The block of rank `from`: its first `arrived(from)` rows, until `finish`.
  virtual at::Tensor incoming(int from) = 0;
  /// Progresses the transport and returns how many rows of the block of `from` have arrived.
  virtual int64_t arrived(int from) = 0;
  /// Waits until at least `rows` rows of the block of `from` have arrived.
  virtual void wait(int from, int64_t rows) = 0;
  /// Progresses the transport without blocking. Cheap enough for the progress hook of a GEMM.
  virtual void progress() = 0;
  /// Waits until this rank's blocks need no further progress from it. Incoming blocks become invalid.
  virtual void finish() = 0;
};

/// Moves blocks between the ranks of one group.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string_view name() const = 0;  // "shm", "ucx"
  /// True if incoming blocks are read in the memory of the peer: nothing is received, and no progress is needed.
  virtual bool zero_copy() const = 0;

  /// Starts a collective. Every rank of the group starts the same ones in the same order, at most two at a time.
  /// all_gather: `local` [rows, columns] is this rank's block for all ranks; it must not change until `finish`.
  virtual std::unique_ptr<InFlightCollective> all_gather(const at::Tensor& local) = 0;
  /// all_gather of a block that the caller writes later, through `outgoing` and `mark_ready` of this rank. Null if the
  /// transport does not support it.
  virtual std::unique_ptr<InFlightCollective> all_gather(int64_t /*rows*/, int64_t /*columns*/,
                                                         at::ScalarType /*dtype*/) {
    return nullptr;
  }
  /// reduce_scatter: the caller writes a block per rank through `outgoing` and `mark_ready`, and sums incoming blocks.
  virtual std::unique_ptr<InFlightCollective> reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) = 0;
};

}  // namespace weft::comm
