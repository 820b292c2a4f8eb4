#include "weft/core/host_memory.h"

#include <atomic>

namespace weft {
namespace {
std::atomic<bool> simulated{false};
}

bool cuda_is_simulated() { return simulated.load(std::memory_order_relaxed); }
void set_cuda_is_simulated() { simulated.store(true, std::memory_order_relaxed); }

}  // namespace weft
