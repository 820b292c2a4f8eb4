#pragma once
// Ranks as threads of one process: each has its own c10d group, registered under its own name, with a backend that
// copies between threads. Input is copied when a collective starts and output is written in wait(), so that a test
// detects a result that is read too early.
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace weft::testing {

/// The inputs of the ranks of one group, by sequence number of the collective.
struct Mailbox {
  explicit Mailbox(int ranks) : size(ranks) {}

  void post(int64_t number, int rank, const at::Tensor& sent) {
    const std::lock_guard lock(mutex);
    auto& slot = slots[number];
    slot.sent.resize(size);
    slot.sent[rank] = sent.clone();
    ++slot.arrived;
    changed.notify_all();
  }

  /// The input of each rank. A slot is erased after all ranks have taken it.
  std::vector<at::Tensor> take(int64_t number, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex);
    auto& slot = slots[number];
    TORCH_CHECK(changed.wait_for(lock, timeout, [&] { return slot.arrived == size; }), "timed out");
    auto sent = slot.sent;
    if (++slot.taken == size) slots.erase(number);
    return sent;
  }

  const int size;

 private:
  struct Slot {
    std::vector<at::Tensor> sent;
    int arrived = 0, taken = 0;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int64_t, Slot> slots;
};

class ThreadWork : public c10d::Work {
 public:
  ThreadWork(std::shared_ptr<Mailbox> mailbox, int64_t number, std::chrono::milliseconds timeout,
             std::function<void(const std::vector<at::Tensor>&)> receive)
      : mailbox_(std::move(mailbox)), number_(number), timeout_(timeout), receive_(std::move(receive)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const auto all = mailbox_->take(number_, timeout == kNoTimeout ? timeout_ : std::min(timeout, timeout_));
    for (const auto& sent : all) TORCH_CHECK(sent.nbytes() == all[0].nbytes(), "ranks sent blocks of different sizes");
    receive_(all);
    return true;
  }

 private:
  std::shared_ptr<Mailbox> mailbox_;
  int64_t number_;
  std::chrono::milliseconds timeout_;
  std::function<void(const std::vector<at::Tensor>&)> receive_;
};

class ThreadBackend : public c10d::Backend {
 public:
  ThreadBackend(int rank, std::shared_ptr<Mailbox> mailbox, std::chrono::milliseconds timeout)
      : Backend(rank, mailbox->size), mailbox_(std::move(mailbox)), timeout_(timeout) {}

  const std::string getBackendName() const override { return "threads"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("threads", timeout_); }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                                 const c10d::AllgatherOptions& options) override {
    return start(in, options.timeout, [out](const auto& all) {
      for (size_t r = 0; r < all.size(); ++r) out.view({-1}).chunk(all.size())[r].copy_(all[r].view({-1}));
    });
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>&,
                                               std::vector<int64_t>&, const c10d::AllToAllOptions& options) override {
    return start(in, options.timeout, [out, rank = getRank()](const auto& all) {
      for (size_t r = 0; r < all.size(); ++r)
        out.view({-1}).chunk(all.size())[r].copy_(all[r].view({-1}).chunk(all.size())[rank]);
    });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return start(tensors[0], options.timeout, [out = tensors[0]](const auto& all) {
      out.copy_(all[0]);
      for (size_t r = 1; r < all.size(); ++r) out.add_(all[r]);
    });
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return start(at::empty({1}), options.timeout, [](const auto&) {});
  }

  /// Number of collectives that this rank has started.
  int64_t started() const { return number_; }

 private:
  c10::intrusive_ptr<c10d::Work> start(const at::Tensor& in, std::chrono::milliseconds timeout,
                                       std::function<void(const std::vector<at::Tensor>&)> receive) {
    mailbox_->post(number_, getRank(), in);
    return c10::make_intrusive<ThreadWork>(mailbox_, number_++, timeout == c10d::kUnsetTimeout ? timeout_ : timeout,
                                           std::move(receive));
  }

  std::shared_ptr<Mailbox> mailbox_;
  std::chrono::milliseconds timeout_;
  int64_t number_ = 0;
};

/// Groups of `size` ranks for as many threads.
class ThreadRanks {
 public:
  explicit ThreadRanks(int size, std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
    static std::atomic<int> made = 0;
    const auto mailbox = std::make_shared<Mailbox>(size);
    const auto common = "threads" + std::to_string(made++);
    for (int rank = 0; rank < size; ++rank) {
      auto group = c10::make_intrusive<c10d::ProcessGroup>(store_, rank, size);
      backends_.push_back(c10::make_intrusive<ThreadBackend>(rank, mailbox, timeout));
      group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backends_.back());
      group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
      group->setGroupName(common);
      names_.push_back(common + "_rank" + std::to_string(rank));
      c10d::register_process_group(names_.back(), group);
      groups_.push_back(std::move(group));
    }
  }
  ThreadRanks(const ThreadRanks&) = delete;
  ThreadRanks& operator=(const ThreadRanks&) = delete;
  ~ThreadRanks() {
    for (const auto& name : names_) c10d::unregister_process_group(name);
  }

  int size() const { return static_cast<int>(names_.size()); }
  const std::string& name(int rank) const { return names_[rank]; }
  const ThreadBackend& backend(int rank) const { return *backends_[rank]; }

  /// Runs `body(rank, name of its group)` on one thread per rank and rethrows the error of the lowest rank.
  template <class Body>
  void run(Body&& body) const {
    std::vector<std::exception_ptr> errors(size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank)
      threads.emplace_back([&, rank] {
        at::set_num_threads(1);  // of this thread
        try {
          body(rank, name(rank));
        } catch (...) {
          errors[rank] = std::current_exception();
        }
      });
    for (auto& thread : threads) thread.join();
    for (const auto& error : errors)
      if (error) std::rethrow_exception(error);
  }

 private:
  // Outlives the groups: ThreadSanitizer must see the last release here, not inside torch.
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> names_;
  std::vector<c10::intrusive_ptr<ThreadBackend>> backends_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
};

}  // namespace weft::testing
