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

/// A collective under way, or a tensor that needs none. One that is dropped finishes first, so that the group stays in
/// step; its error is then kept by the group.
class Work {
 public:
  Work(at::Tensor ready) : ready_(std::move(ready)) {}  // NOLINT(google-explicit-constructor)
  explicit Work(std::function<at::Tensor()> finish) : finish_(std::move(finish)) {}
  Work(Work&& other) noexcept : ready_(std::move(other.ready_)), finish_(std::exchange(other.finish_, nullptr)) {}
  Work& operator=(Work&&) = delete;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  ~Work();

  /// The result. To be called once.
  at::Tensor wait();

 private:
  at::Tensor ready_;
  std::function<at::Tensor()> finish_;
};

/// The ranks of a c10d group, found by the name it is registered under. Blocks lie along the first dimension, rank by
/// rank. Sums are taken in float32 (float64 of float64) in the order of ranks and rounded once: all ranks get the same
/// bits. Every rank must run the same collectives in the same order; each is preceded by an exchange of what each rank
/// is about to do, and a difference raises DistError on every rank (WEFT_CHECK=first: only the first 100 of a group
/// are). A wait ends after WEFT_TIMEOUT seconds, else after the group's own timeout. After an error, here or on its
/// link, the group refuses further use.
class Group {
 public:
  /// Raises ValueError if no group has the name.
  explicit Group(const std::string& name);
  Group(const Group&);
  Group& operator=(const Group&) = delete;
  ~Group();

  int rank() const;
  int size() const;
  std::chrono::milliseconds timeout() const;
  const c10::intrusive_ptr<c10d::ProcessGroup>& c10d() const { return c10d_; }
  /// The group's own name, equal on all ranks, which the name it is registered under need not be; may be empty.
  std::string common_name() const;
  /// Shared with whatever else uses the group on this rank; outlives it.
  const std::shared_ptr<GroupFailure>& failure() const;

  /// x of all ranks, one after the other.
  Work all_gather(const at::Tensor& x) const;
  /// This rank's block of the sum of x over all ranks.
  Work reduce_scatter(const at::Tensor& x) const;
  /// The sum of x over all ranks. x is not changed.
  Work all_reduce(const at::Tensor& x) const;

 private:
  struct State;             // what outlives a call
  class CheckedCollective;  // one collective of it

  c10::intrusive_ptr<c10d::ProcessGroup> c10d_;
  std::shared_ptr<State> state_;
};

}  // namespace weft::comm
