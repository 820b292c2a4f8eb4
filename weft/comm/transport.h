#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>

namespace weft::comm {

enum class CommOp : uint32_t { all_gather = 1, reduce_scatter, all_reduce, grow, barrier, put_signal, wait_signal };

/// What all ranks must say alike before bytes move.
struct CollectiveFingerprint {
  CommOp op = CommOp::all_gather;
  at::ScalarType dtype = at::kFloat;
  int64_t rows = 0;     // of one rank's block
  int64_t columns = 0;  // of a row
  bool operator==(const CollectiveFingerprint&) const = default;
};

/// One round of blocks between the ranks of a group: this rank has a block [rows, columns] for each peer and gets one
/// from each. Rows become final from the first to the last. Used by one thread; never blocks except in `wait` and
/// `finish`, which raise at the timeout, when a peer has failed, or when its agreement differs.
class InFlightCollective {
 public:
  InFlightCollective() = default;
  InFlightCollective(const InFlightCollective&) = delete;
  InFlightCollective& operator=(const InFlightCollective&) = delete;
  /// Leaves the group unusable if the exchange was not finished.
  virtual ~InFlightCollective() = default;

  /// Where this rank writes its block for rank `to`. An all-gather has one block for all, already given.
  virtual at::Tensor outgoing(int to) = 0;
  /// Rows [0, rows) of the block for `to` are final.
  virtual void mark_ready(int to, int64_t rows) = 0;
  /// The block of rank `from`, valid up to `arrived(from)` rows and until `finish`.
  virtual at::Tensor incoming(int from) = 0;
  /// Moves bytes if any can be moved, and tells how many rows of the block of `from` are there.
  virtual int64_t arrived(int from) = 0;
  /// Returns when at least `rows` rows are there.
  virtual void wait(int from, int64_t rows) = 0;
  /// Moves bytes if any can be moved. Cheap enough for once per 10 µs of computation.
  virtual void progress() = 0;
  /// Returns when this rank's blocks need no more help from it; incoming blocks are no longer valid.
  virtual void finish() = 0;
};

/// A way between the ranks of one group.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string_view name() const = 0;  // "shm", "ucx"
  /// Blocks that arrive are read where the peer wrote them: no bytes are received, waiting costs nothing but time.
  virtual bool zero_copy() const = 0;

  /// Starts a round; every rank of the group starts the same ones in the same order. At most two are open at a time.
  /// all_gather: `local` [rows, columns] is this rank's block for everyone; it must stay as it is until `finish`.
  virtual std::unique_ptr<InFlightCollective> all_gather(const at::Tensor& local) = 0;
  /// all_gather of a block that is written on the way, by `outgoing` and `mark_ready` of this rank. Null if the link
  /// cannot.
  virtual std::unique_ptr<InFlightCollective> all_gather(int64_t /*rows*/, int64_t /*columns*/,
                                                         at::ScalarType /*dtype*/) {
    return nullptr;
  }
  /// reduce_scatter: a block for each rank, to be written through `outgoing` and `mark_ready`; the caller sums.
  virtual std::unique_ptr<InFlightCollective> reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) = 0;
};

}  // namespace weft::comm
