#include "weft/comm/run_with_deadline.h"

#include <future>
#include <thread>

#include "weft/comm/interrupt.h"

namespace weft::comm {

bool run_with_deadline(std::chrono::steady_clock::time_point deadline, std::function<void()> fn,
                       const std::function<void()>& poll) {
  constexpr auto kPollInterval = std::chrono::milliseconds(10);
  std::packaged_task<void()> task(std::move(fn));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  while (result.wait_for(kPollInterval) != std::future_status::ready) {
    poll();
    check_interrupt();
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
  result.get();
  return true;
}

}  // namespace weft::comm
