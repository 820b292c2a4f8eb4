#include "weft/comm/guarded_link.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <thread>

namespace weft::comm {

class GuardedLink::Use {
 public:
  explicit Use(std::shared_ptr<GroupFailure> failure) : failure_(std::move(failure)) {}

  /// Before a round starts: this thread takes the link, or has it.
  void take() {
    failure_->check();
    std::thread::id other;
    const auto me = std::this_thread::get_id();
    if (!owner_.compare_exchange_strong(other, me) && other != me) refuse();
    ++open_;
  }
  /// A round is over, or did not start.
  void release() noexcept {
    if (--open_ == 0) owner_ = std::thread::id();
  }
  /// Runs a call of an open round.
  template <class Act>
  auto run(Act&& act) {
    if (owner_.load(std::memory_order_relaxed) != std::this_thread::get_id()) refuse();
    try {
      return act();
    } catch (const c10::DistError& error) {
      fail(error.what_without_backtrace());
      throw;
    } catch (const c10::OutOfMemoryError& error) {
      fail(error.what_without_backtrace());
      throw;
    }
  }
  void fail(const std::string& why) { failure_->put(why); }

 private:
  [[noreturn]] void refuse() const {
    TORCH_CHECK(false, "The link of group '", failure_->group(),
                "' is in use by another thread. Run the collectives of a group on one thread, or give each thread a "
                "group of its own.");
  }

  std::shared_ptr<GroupFailure> failure_;
  std::atomic<std::thread::id> owner_;
  int open_ = 0;  // rounds; for the owner alone
};

class GuardedLink::Round final : public Exchange {
 public:
  Round(std::shared_ptr<Use> use, std::unique_ptr<Exchange> exchange)
      : use_(std::move(use)), exchange_(std::move(exchange)) {}
  ~Round() override {
    if (!finished_) use_->fail("A round on its link was given up before it was finished.");
    exchange_.reset();
    use_->release();
  }

  at::Tensor outgoing(int to) override {
    return use_->run([&] { return exchange_->outgoing(to); });
  }
  void publish(int to, int64_t rows) override {
    use_->run([&] { exchange_->publish(to, rows); });
  }
  at::Tensor incoming(int from) override {
    return use_->run([&] { return exchange_->incoming(from); });
  }
  int64_t arrived(int from) override {
    return use_->run([&] { return exchange_->arrived(from); });
  }
  void wait(int from, int64_t rows) override {
    use_->run([&] { exchange_->wait(from, rows); });
  }
  void advance() override {
    use_->run([&] { exchange_->advance(); });
  }
  void finish() override {
    use_->run([&] { exchange_->finish(); });
    finished_ = true;
  }

 private:
  std::shared_ptr<Use> use_;
  std::unique_ptr<Exchange> exchange_;
  bool finished_ = false;
};

GuardedLink::GuardedLink(std::shared_ptr<GroupFailure> failure, std::unique_ptr<Link> link)
    : link_(std::move(link)), use_(std::make_shared<Use>(std::move(failure))) {}

GuardedLink::~GuardedLink() = default;

template <class Start>
std::unique_ptr<Exchange> GuardedLink::start(Start&& start) {
  use_->take();
  try {
    if (auto exchange = use_->run(start)) return std::make_unique<Round>(use_, std::move(exchange));
  } catch (...) {
    use_->release();
    throw;
  }
  use_->release();
  return nullptr;
}

std::unique_ptr<Exchange> GuardedLink::all_gather(const at::Tensor& mine) {
  return start([&] { return link_->all_gather(mine); });
}

std::unique_ptr<Exchange> GuardedLink::all_gather(int64_t rows, int64_t columns, at::ScalarType dtype) {
  return start([&] { return link_->all_gather(rows, columns, dtype); });
}

std::unique_ptr<Exchange> GuardedLink::reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) {
  return start([&] { return link_->reduce_scatter(rows, columns, dtype); });
}

}  // namespace weft::comm
