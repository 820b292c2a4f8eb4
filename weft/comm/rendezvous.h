#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "weft/comm/process.h"
#include "weft/comm/shared_memory.h"

namespace weft::comm {

using SharedMemories = std::vector<std::shared_ptr<SharedMemory>>;

/// Exchanges shared memory between the ranks of a group.
class Rendezvous {
 public:
  Rendezvous() = default;
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  virtual ~Rendezvous() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Timeout of every wait.
  virtual std::chrono::milliseconds timeout() const = 0;

  /// Shares `local` with all ranks and returns the memory of each, in rank order. A collective call: every rank passes
  /// memory of the same size. Raises DistError at the timeout or if a peer fails a check. `poll` is called while
  /// waiting and may raise.
  virtual SharedMemories exchange_memory(std::shared_ptr<SharedMemory> local, const std::function<void()>& poll) = 0;

  /// Valid after the first exchange: a random number that all ranks share, and the process of a rank.
  virtual uint64_t group_id() const = 0;
  virtual const Process& process(int rank) const = 0;
};

}  // namespace weft::comm
