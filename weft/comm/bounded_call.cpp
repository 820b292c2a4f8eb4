#include "weft/comm/bounded_call.h"

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "weft/comm/interrupt.h"

namespace weft::comm {
namespace {

struct Outcome {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  std::exception_ptr error;
};

void run(const std::shared_ptr<Outcome>& outcome, const std::function<void()>& act) {
  std::exception_ptr error;
  try {
    act();
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(outcome->mutex);
  outcome->over = true;
  outcome->error = std::move(error);
  outcome->changed.notify_all();
}

}  // namespace

bool finish_by(std::chrono::steady_clock::time_point deadline, std::function<void()> act,
               const std::function<void()>& look) {
  constexpr auto kLook = std::chrono::milliseconds(10);
  const auto outcome = std::make_shared<Outcome>();
  std::thread([outcome, act = std::move(act)] { run(outcome, act); }).detach();
  std::unique_lock lock(outcome->mutex);
  while (!outcome->changed.wait_for(lock, kLook, [&] { return outcome->over; })) {
    lock.unlock();
    look();
    check_interrupt();
    if (std::chrono::steady_clock::now() >= deadline) return false;
    lock.lock();
  }
  if (outcome->error) std::rethrow_exception(outcome->error);
  return true;
}

}  // namespace weft::comm
