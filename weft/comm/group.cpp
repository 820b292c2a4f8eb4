#include "weft/comm/group.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <atomic>
#include <csignal>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "weft/comm/collective_fingerprint.h"
#include "weft/comm/group_failure.h"
#include "weft/comm/interrupt.h"
#include "weft/comm/mismatch.h"
#include "weft/comm/settings.h"

namespace weft::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

milliseconds timeout_of(c10d::ProcessGroup& group) {
  if (const auto from_env = timeout_from_env()) return *from_env;
  try {
    const auto timeout = group.getDefaultBackend()->getBackendOptions()->timeout;
    return timeout.count() > 0 ? timeout : kBackendDefaultTimeout;
  } catch (const c10::Error&) {  // a backend without options
    return kBackendDefaultTimeout;
  }
}

c10::intrusive_ptr<c10d::ProcessGroup> resolve(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(false, "No process group is registered as '", name,
                      "'. Call torch.distributed.init_process_group first (in C++: c10d::register_process_group).");
  }
}

/// View as bytes: every backend moves uint8, whatever the dtype.
at::Tensor as_bytes(const at::Tensor& t) { return t.view({t.numel()}).view(at::kByte); }

/// Sum over dimension 0 in rank order.
at::Tensor sum_in_order(const at::Tensor& blocks) {
  const auto opmath_dtype = blocks.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto sum = at::add(blocks[0].to(opmath_dtype), blocks[1]);
  for (int64_t r = 2; r < blocks.size(0); ++r) sum.add_(blocks[r]);
  return sum.to(blocks.scalar_type());
}

/// Fingerprint of x viewed as [rows, columns].
CollectiveFingerprint fingerprint_of(CommOp op, const at::Tensor& x) {
  const bool scalar = x.dim() == 0;
  TORCH_CHECK_VALUE(!scalar || op == CommOp::all_reduce, name(op),
                    ": expected a tensor with at least 1 dimension, got a scalar.");
  const auto rows = scalar ? 1 : x.size(0);
  return {op, x.scalar_type(), rows, rows == 0 ? 0 : x.numel() / rows};
}

}  // namespace

at::Tensor Work::wait() { return finish_ ? std::exchange(finish_, nullptr)() : std::move(ready_); }

Work::~Work() {
  if (!finish_) return;
  try {
    finish_();
  } catch (const c10::Error&) {
    return;  // the group keeps the error
  } catch (...) {
    std::raise(SIGINT);  // an interrupt: raise it again for the next check
  }
}

// ---- state of a group ---------------------------------------------------------------------------------------------

struct Group::State {
  State(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& name)
      : c10d(group),
        checked(checked_collectives()),
        timeout(timeout_of(*group)),
        failure(std::make_shared<GroupFailure>(name)) {}

  /// Raises DistError and marks the group as failed.
  [[noreturn]] void fail(const std::string& reason) const {
    failure->put(reason);
    C10_THROW_ERROR(DistError, reason + " Group '" + failure->group() +
                                   "' cannot be used any more: destroy it and create a new one.");
  }

  const c10::weak_intrusive_ptr<c10d::ProcessGroup> c10d;
  const int64_t checked;
  const milliseconds timeout;
  const std::shared_ptr<GroupFailure> failure;
  std::atomic<int64_t> collectives = 0;
};

Group::Group(const std::string& name) : c10d_(resolve(name)) {
  static std::mutex mutex;
  static auto* states = new std::map<std::string, std::shared_ptr<State>>;  // never destroyed: may be used at exit
  const std::lock_guard lock(mutex);
  auto& state = (*states)[name];
  // After destroy_process_group a new group may reuse the name.
  if (!state || state->c10d.lock() != c10d_) state = std::make_shared<State>(c10d_, name);
  state_ = state;
}

Group::Group(const std::string& name, int64_t expected_size) : Group(name) {
  TORCH_CHECK_VALUE(size() == expected_size, "Process group '", name, "' has ", size(), " ranks, expected ",
                    expected_size,
                    ", the size that the operation was created with (tensor_parallel_size, process_group_size).");
}

Group::Group(const Group&) = default;
Group::~Group() = default;

int Group::rank() const { return c10d_->getRank(); }
int Group::size() const { return c10d_->getSize(); }
milliseconds Group::timeout() const { return state_->timeout; }
const std::shared_ptr<GroupFailure>& Group::failure() const { return state_->failure; }

std::string Group::common_name() const {
  try {
    return c10d_->getGroupName();
  } catch (const c10::Error&) {  // a group without a backend has no name
    return "";
  }
}

// ---- one collective -----------------------------------------------------------------------------------------------

class Group::CheckedCollective {
 public:
  /// Takes the next sequence number and, if checking is on, compares fingerprints with the other ranks. x must be
  /// contiguous; a small one is sent in the same message.
  CheckedCollective(const Group& group, const CollectiveFingerprint& fingerprint, const at::Tensor& x);

  /// x of all ranks, [ranks, values], if it was sent with the fingerprints; otherwise undefined.
  const at::Tensor& inlined() const { return inlined_; }
  void start_all_gather(const at::Tensor& out, const at::Tensor& block);
  /// Sends block i to rank i.
  void start_all_to_all(const at::Tensor& out, const at::Tensor& blocks);
  void wait();

 private:
  /// Waits 100 ms at most; true when the work is complete. Raises at the deadline.
  bool wait_slice();
  void check_fingerprints(const at::Tensor& x);
  milliseconds time_left() const {
    return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now()));
  }
  /// Runs `fn`; an error fails the group.
  template <class Fn>
  void guarded(Fn&& fn) {
    try {
      fn();
    } catch (const std::exception& error) {
      const auto* ours = dynamic_cast<const c10::Error*>(&error);
      group_.state_->fail("Collective " + std::to_string(local_.seq) + " (" + text(local_.fingerprint) +
                          ") failed on rank " + std::to_string(group_.rank()) + ": " +
                          (ours ? ours->what_without_backtrace() : error.what()) + ".");
    }
  }

  Group group_;
  SequencedFingerprint local_;
  at::Device device_;
  Clock::time_point deadline_;
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor inlined_;
};

Group::CheckedCollective::CheckedCollective(const Group& group, const CollectiveFingerprint& fingerprint,
                                            const at::Tensor& x)
    : group_(group),
      local_{group.state_->collectives++, fingerprint},
      device_(x.device()),
      deadline_(Clock::now() + group.state_->timeout) {
  group_.state_->failure->check();
  if (local_.seq < group_.state_->checked) check_fingerprints(x);
}

/// The message has the same size for every collective: Gloo aborts the process if sizes differ. It has space for 8 KB
/// of data, which cost no extra time, so a small x needs no second message.
void Group::CheckedCollective::check_fingerprints(const at::Tensor& x) {
  constexpr int64_t kWords = 5, kHeaderBytes = kWords * sizeof(int64_t), kMaxInlineBytes = 8 << 10;
  const auto& [op, dtype, rows, columns] = local_.fingerprint;
  const std::array<int64_t, kWords> words{local_.seq, static_cast<int64_t>(op), static_cast<int64_t>(dtype), rows,
                                          columns};
  const auto count = static_cast<int64_t>(x.nbytes());
  const bool fits = count > 0 && count <= kMaxInlineBytes;
  const auto local = at::zeros({kHeaderBytes + kMaxInlineBytes}, x.options().dtype(at::kByte));
  local.narrow(0, 0, kHeaderBytes).copy_(at::tensor(at::ArrayRef<int64_t>(words)).view(at::kByte));
  if (fits) local.narrow(0, kHeaderBytes, count).copy_(as_bytes(x));
  const auto all = at::empty({group_.size(), kHeaderBytes + kMaxInlineBytes}, local.options());
  start_all_gather(all, local);
  wait();
  const auto headers = all.narrow(1, 0, kHeaderBytes).contiguous().view(at::kLong).cpu();
  std::vector<SequencedFingerprint> by_rank;
  for (int r = 0; r < group_.size(); ++r) {
    const auto* w = headers.const_data_ptr<int64_t>() + r * kWords;
    by_rank.push_back({w[0], {static_cast<CommOp>(w[1]), static_cast<at::ScalarType>(w[2]), w[3], w[4]}});
  }
  const auto mismatch = describe_mismatch(by_rank);
  if (!mismatch.empty())
    group_.state_->fail(
        "Mismatch between the collectives of the ranks: " + mismatch +
        ". Every rank must run the same collectives in the same order, with the same sizes and dtypes.");
  if (fits) inlined_ = all.narrow(1, kHeaderBytes, count).contiguous().view(x.scalar_type());
}

void Group::CheckedCollective::start_all_gather(const at::Tensor& out, const at::Tensor& block) {
  if (out.numel() == 0) return;
  guarded([&] {
    auto to = as_bytes(out), from = as_bytes(block);
    work_ = group_.c10d_->all_gather_single(to, from, {.timeout = time_left()});
  });
}

void Group::CheckedCollective::start_all_to_all(const at::Tensor& out, const at::Tensor& blocks) {
  if (out.numel() == 0) return;
  guarded([&] {
    auto to = as_bytes(out), from = as_bytes(blocks);
    std::vector<int64_t> equal_splits;
    work_ = group_.c10d_->all_to_all_single(to, from, equal_splits, equal_splits, {.timeout = time_left()});
  });
}

void Group::CheckedCollective::wait() {
  if (!work_) return;
  // On other devices the backend enforces the timeout it was given.
  if (!device_.is_cpu()) guarded([&] { work_->wait(kNoTimeout); });
  while (device_.is_cpu() && !wait_slice()) {
    try {
      check_interrupt();
    } catch (...) {
      group_.state_->failure->put(text(local_.fingerprint) + " was interrupted.");
      throw;
    }
  }
  work_.reset();
}

bool Group::CheckedCollective::wait_slice() {
  constexpr milliseconds kWaitSlice(100);
  bool done = true;
  guarded([&] {
    const auto start = Clock::now();
    if (time_left() <= kWaitSlice) return void(work_->wait(time_left()));
    try {
      work_->wait(kWaitSlice);
    } catch (const std::exception&) {
      if (Clock::now() - start < kWaitSlice) throw;  // an error, not the timeout
      done = work_->isCompleted();
      if (done) work_->wait(time_left());  // completed meanwhile: returns, or raises its error
    }
  });
  return done;
}

// ---- the collectives ----------------------------------------------------------------------------------------------

Work Group::all_gather(const at::Tensor& x) const {
  if (size() == 1) return x;
  const auto local = x.contiguous();
  const auto collective = std::make_shared<CheckedCollective>(*this, fingerprint_of(CommOp::all_gather, x), local);
  auto sizes = x.sizes().vec();
  sizes[0] *= size();
  if (collective->inlined().defined()) return collective->inlined().view(sizes);
  auto out = at::empty(sizes, x.options());
  collective->start_all_gather(out, local);
  return Work([collective, out] {
    collective->wait();
    return out;
  });
}

Work Group::reduce_scatter(const at::Tensor& x) const {
  if (size() == 1) return x;
  const auto local = x.contiguous();
  const auto collective = std::make_shared<CheckedCollective>(*this, fingerprint_of(CommOp::reduce_scatter, x), local);
  // After the fingerprint check, so that every rank raises.
  TORCH_CHECK_VALUE(x.size(0) % size() == 0, "reduce_scatter: the first dimension of ", x.sizes(),
                    " does not divide over ", size(), " ranks.");
  auto sizes = x.sizes().vec();
  sizes[0] /= size();
  if (collective->inlined().defined())
    return sum_in_order(collective->inlined().view({size(), size(), x.numel() / size()}).select(1, rank())).view(sizes);
  auto parts = at::empty(x.sizes(), x.options());
  collective->start_all_to_all(parts, local);
  return Work([collective, parts, sizes, ranks = size()] {
    collective->wait();
    return sum_in_order(parts.view({ranks, parts.numel() / ranks})).view(sizes);
  });
}

Work Group::all_reduce(const at::Tensor& x) const {
  if (size() == 1) return x;
  auto local = x.contiguous().view({x.numel()});
  const auto collective = std::make_shared<CheckedCollective>(*this, fingerprint_of(CommOp::all_reduce, x), local);
  if (collective->inlined().defined()) return sum_in_order(collective->inlined()).view(x.sizes());
  const auto block = (x.numel() + size() - 1) / size();
  if (block * size() != x.numel()) {
    auto padded = at::zeros({block * size()}, x.options());
    padded.narrow(0, 0, x.numel()).copy_(local);
    local = std::move(padded);
  }
  auto parts = at::empty({size(), block}, x.options());
  collective->start_all_to_all(parts, local);
  return Work([collective, parts, sizes = x.sizes().vec(), count = x.numel()] {
    collective->wait();
    auto out = at::empty({parts.numel()}, parts.options());
    collective->start_all_gather(out, sum_in_order(parts));
    collective->wait();
    return out.narrow(0, 0, count).view(sizes);
  });
}

}  // namespace weft::comm
