#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace c10d {
class ProcessGroup;
}

namespace weft::comm {

class GroupFailure;

/// A running collective, or a result that is ready. The destructor waits for a collective that was not waited for, so
/// that the ranks stay in step; an error then becomes the sticky error of the group.
class Work {
 public:
  Work(at::Tensor ready) : ready_(std::move(ready)) {}  // NOLINT(google-explicit-constructor)
  explicit Work(std::function<at::Tensor()> finish) : finish_(std::move(finish)) {}
  Work(Work&& other) noexcept : ready_(std::move(other.ready_)), finish_(std::exchange(other.finish_, nullptr)) {}
  Work& operator=(Work&&) = delete;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  ~Work();

  /// Waits for the collective and returns its result. Call it once.
  at::Tensor wait();

 private:
  at::Tensor ready_;
  std::function<at::Tensor()> finish_;
};

/// Collectives of a registered c10d group. Blocks are concatenated along dimension 0 in rank order. Sums accumulate in
/// float32 (float64 for float64) in rank order and round once, so all ranks get the same bits. Every rank must run the
/// same collectives in the same order: the ranks exchange fingerprints before each one, and a mismatch raises DistError
/// on every rank (WEFT_CHECK=first: only for the first 100). A wait raises after WEFT_TIMEOUT seconds or, if that is
/// unset, after the group's timeout. After an error in a collective or in its transport the group rejects further
/// calls.
class Group {
 public:
  /// Raises ValueError if no group is registered as `name`.
  explicit Group(const std::string& name);
  /// Also raises ValueError if the group does not have `expected_size` ranks: the tensors were sharded for that many.
  Group(const std::string& name, int64_t expected_size);
  Group(const Group&);
  Group& operator=(const Group&) = delete;
  ~Group();

  int rank() const;
  int size() const;
  std::chrono::milliseconds timeout() const;
  const c10::intrusive_ptr<c10d::ProcessGroup>& c10d() const { return c10d_; }
  /// The c10d group name, equal on all ranks; the registered name may differ between ranks. May be empty.
  std::string common_name() const;
  /// Shared by all users of the group on this rank; outlives the group.
  const std::shared_ptr<GroupFailure>& failure() const;

  /// The x of all ranks, concatenated.
  Work all_gather(const at::Tensor& x) const;
  /// This rank's block of the sum of x over the ranks.
  Work reduce_scatter(const at::Tensor& x) const;
  /// Sum of x over the ranks; x is not modified.
  Work all_reduce(const at::Tensor& x) const;

 private:
  struct State;             // lives as long as the group
  class CheckedCollective;  // one running collective

  c10::intrusive_ptr<c10d::ProcessGroup> c10d_;
  std::shared_ptr<State> state_;
};

}  // namespace weft::comm
