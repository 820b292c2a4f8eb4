#include "weft/comm/run_with_deadline.h"

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "weft/comm/interrupt.h"

namespace weft::comm {
namespace {

struct CallResult {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
};

void run(const std::shared_ptr<CallResult>& result, const std::function<void()>& fn) {
  std::exception_ptr error;
  try {
    fn();
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(result->mutex);
  result->done = true;
  result->error = std::move(error);
  result->changed.notify_all();
}

}  // namespace

bool run_with_deadline(std::chrono::steady_clock::time_point deadline, std::function<void()> fn,
                       const std::function<void()>& poll) {
  constexpr auto kPollInterval = std::chrono::milliseconds(10);
  const auto result = std::make_shared<CallResult>();
  std::thread([result, fn = std::move(fn)] { run(result, fn); }).detach();
  std::unique_lock lock(result->mutex);
  while (!result->changed.wait_for(lock, kPollInterval, [&] { return result->done; })) {
    lock.unlock();
    poll();
    check_interrupt();
    if (std::chrono::steady_clock::now() >= deadline) return false;
    lock.lock();
  }
  if (result->error) std::rethrow_exception(result->error);
  return true;
}

}  // namespace weft::comm
