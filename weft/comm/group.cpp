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
    const auto own = group.getDefaultBackend()->getBackendOptions()->timeout;
    return own.count() > 0 ? own : kBackendDefaultTimeout;
  } catch (const c10::Error&) {  // a backend without options
    return kBackendDefaultTimeout;
  }
}

c10::intrusive_ptr<c10d::ProcessGroup> resolve(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(false, "No process group is registered under the name '", name,
                      "'. Initialise torch.distributed before the call; in C++, c10d::register_process_group.");
  }
}

/// What moves needs no arithmetic: as bytes, any backend can move any dtype.
at::Tensor as_bytes(const at::Tensor& t) { return t.view({t.numel()}).view(at::kByte); }

/// The sum over the first dimension, rank by rank.
at::Tensor sum_in_order(const at::Tensor& blocks) {
  const auto opmath_dtype = blocks.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto sum = at::add(blocks[0].to(opmath_dtype), blocks[1]);
  for (int64_t r = 2; r < blocks.size(0); ++r) sum.add_(blocks[r]);
  return sum.to(blocks.scalar_type());
}

/// x as [rows, columns].
CollectiveFingerprint fingerprint_of(CommOp op, const at::Tensor& x) {
  const bool scalar = x.dim() == 0;
  TORCH_CHECK_VALUE(!scalar || op == CommOp::all_reduce,
                    "all_gather and reduce_scatter need a tensor with a first dimension, got a scalar.");
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
    return;  // the group remembers it
  } catch (...) {
    std::raise(SIGINT);  // an interrupt, which must not be lost: whoever checks next gets it
  }
}

// ---- what a group remembers between calls -------------------------------------------------------------------------

struct Group::State {
  State(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& name)
      : c10d(group),
        checked(checked_collectives()),
        timeout(timeout_of(*group)),
        failure(std::make_shared<GroupFailure>(name)) {}

  /// Raises; from then on the group is refused.
  [[noreturn]] void fail(const std::string& reason) const {
    failure->put(reason);
    C10_THROW_ERROR(DistError, reason + " Group '" + failure->group() +
                                   "' cannot be used any more: destroy it and make a new one.");
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
  // After destroy_process_group another group may get the name.
  if (!state || state->c10d.lock() != c10d_) state = std::make_shared<State>(c10d_, name);
  state_ = state;
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
  } catch (const c10::Error&) {  // it has no backend to keep one
    return "";
  }
}

// ---- one collective -----------------------------------------------------------------------------------------------

class Group::CheckedCollective {
 public:
  /// Takes the group's next number and agrees with the other ranks if that is due. A small x, contiguous, goes along.
  CheckedCollective(const Group& group, const CollectiveFingerprint& fingerprint, const at::Tensor& x);

  /// x of each rank, [ranks, values], if it went along; else undefined.
  const at::Tensor& inlined() const { return inlined_; }
  /// Starts to collect the blocks of all ranks.
  void start_all_gather(const at::Tensor& out, const at::Tensor& block);
  /// Starts to send block i to rank i, and to collect what the others send.
  void start_all_to_all(const at::Tensor& out, const at::Tensor& blocks);
  void wait();

 private:
  /// False if the work is not over after a tenth of a second. Raises at the deadline.
  bool wait_slice();
  void check_fingerprints(const at::Tensor& x);
  milliseconds time_left() const {
    return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now()));
  }
  /// Runs `fn`; its error becomes the group's.
  template <class Fn>
  void guarded(Fn&& fn) {
    try {
      fn();
    } catch (const std::exception& error) {
      const auto* ours = dynamic_cast<const c10::Error*>(&error);
      group_.state_->fail(text(local_.fingerprint) + ", collective " + std::to_string(local_.seq) + " of rank " +
                          std::to_string(group_.rank()) +
                          ", failed: " + (ours ? ours->what_without_backtrace() : error.what()) + ".");
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

/// Messages of different sizes could end a process, so this one has the same size whatever the ranks are about to do.
/// It takes as long with 8 KB as without; so a small x needs no other.
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
    group_.state_->fail("The ranks disagree about a collective: " + mismatch +
                        ". Every rank must run the same operations in the same order, on equal sizes and dtypes.");
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
  // Other devices go on by themselves, under the timeout that the backend was given.
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
      if (Clock::now() - start < kWaitSlice) throw;  // no timeout
      done = work_->isCompleted();
      if (done) work_->wait(time_left());  // came just now, or raises why not
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
  // Asked after the agreement: then every rank raises.
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
