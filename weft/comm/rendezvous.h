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

/// Where the ranks of a group hand each other memory.
class Rendezvous {
 public:
  Rendezvous() = default;
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  virtual ~Rendezvous() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Of every wait.
  virtual std::chrono::milliseconds timeout() const = 0;

  /// Gives `local` and gets everybody's, in the order of ranks. Every rank calls this at the same time, with memory of
  /// the same size; raises DistError at the timeout or when a peer is not what it should be. `poll` is called while
  /// waiting and may raise.
  virtual SharedMemories exchange_memory(std::shared_ptr<SharedMemory> local, const std::function<void()>& poll) = 0;

  /// After the first meeting: a random number that all ranks share, and who a peer is.
  virtual uint64_t group_id() const = 0;
  virtual const Process& process(int rank) const = 0;
};

}  // namespace weft::comm
