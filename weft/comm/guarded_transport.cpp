#include "weft/comm/guarded_transport.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <thread>

namespace weft::comm {

class GuardedTransport::ThreadGuard {
 public:
  explicit ThreadGuard(std::shared_ptr<GroupFailure> failure) : failure_(std::move(failure)) {}

  /// Makes the calling thread the owner. Raises if another thread is.
  void acquire() {
    failure_->check();
    std::thread::id other;
    const auto me = std::this_thread::get_id();
    if (!owner_.compare_exchange_strong(other, me) && other != me) throw_wrong_thread();
    ++open_;
  }
  /// A collective has ended or failed to start.
  void release() noexcept {
    if (--open_ == 0) owner_ = std::thread::id();
  }
  /// Runs `fn` on the owner thread; its error fails the group.
  template <class Fn>
  auto run(Fn&& fn) {
    if (owner_.load(std::memory_order_relaxed) != std::this_thread::get_id()) throw_wrong_thread();
    try {
      return fn();
    } catch (const c10::DistError& error) {
      fail(error.what_without_backtrace());
      throw;
    } catch (const c10::OutOfMemoryError& error) {
      fail(error.what_without_backtrace());
      throw;
    }
  }
  void fail(const std::string& reason) { failure_->put(reason); }

 private:
  [[noreturn]] void throw_wrong_thread() const {
    TORCH_CHECK(false, "The transport of group '", failure_->group(),
                "' is in use by another thread. Run the collectives of a group on one thread, or create one group per "
                "thread.");
  }

  std::shared_ptr<GroupFailure> failure_;
  std::atomic<std::thread::id> owner_;
  int open_ = 0;  // open collectives; only the owner reads and writes it
};

class GuardedTransport::GuardedCollective final : public InFlightCollective {
 public:
  GuardedCollective(std::shared_ptr<ThreadGuard> guard, std::unique_ptr<InFlightCollective> collective)
      : guard_(std::move(guard)), collective_(std::move(collective)) {}
  ~GuardedCollective() override {
    if (!finished_) guard_->fail("A collective was destroyed before it finished.");
    collective_.reset();
    guard_->release();
  }

  at::Tensor outgoing(int to) override {
    return guard_->run([&] { return collective_->outgoing(to); });
  }
  void mark_ready(int to, int64_t rows) override {
    guard_->run([&] { collective_->mark_ready(to, rows); });
  }
  at::Tensor incoming(int from) override {
    return guard_->run([&] { return collective_->incoming(from); });
  }
  int64_t arrived(int from) override {
    return guard_->run([&] { return collective_->arrived(from); });
  }
  void wait(int from, int64_t rows) override {
    guard_->run([&] { collective_->wait(from, rows); });
  }
  void progress() override {
    guard_->run([&] { collective_->progress(); });
  }
  void finish() override {
    guard_->run([&] { collective_->finish(); });
    finished_ = true;
  }

 private:
  std::shared_ptr<ThreadGuard> guard_;
  std::unique_ptr<InFlightCollective> collective_;
  bool finished_ = false;
};

GuardedTransport::GuardedTransport(std::shared_ptr<GroupFailure> failure, std::unique_ptr<Transport> transport)
    : transport_(std::move(transport)), guard_(std::make_shared<ThreadGuard>(std::move(failure))) {}

GuardedTransport::~GuardedTransport() = default;

template <class Start>
std::unique_ptr<InFlightCollective> GuardedTransport::start(Start&& start) {
  guard_->acquire();
  try {
    if (auto collective = guard_->run(start)) return std::make_unique<GuardedCollective>(guard_, std::move(collective));
  } catch (...) {
    guard_->release();
    throw;
  }
  guard_->release();
  return nullptr;
}

std::unique_ptr<InFlightCollective> GuardedTransport::all_gather(const at::Tensor& local) {
  return start([&] { return transport_->all_gather(local); });
}

std::unique_ptr<InFlightCollective> GuardedTransport::all_gather(int64_t rows, int64_t columns, at::ScalarType dtype) {
  return start([&] { return transport_->all_gather(rows, columns, dtype); });
}

std::unique_ptr<InFlightCollective> GuardedTransport::reduce_scatter(int64_t rows, int64_t columns,
                                                                     at::ScalarType dtype) {
  return start([&] { return transport_->reduce_scatter(rows, columns, dtype); });
}

}  // namespace weft::comm
