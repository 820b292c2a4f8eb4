#pragma once
// Ranks as threads of the test, with one shared-memory transport:
//   const auto errors = run_ranks(4, [](comm::ShmTransport& transport) { transport.all_gather(x); … });
// returns the error of each rank, "" if it raised none.
#include <c10/util/Exception.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/comm/thread_rendezvous.h"
#include "weft/comm/shm_transport.h"

namespace weft::testing {

using std::chrono::milliseconds;

inline std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// Runs `body(rank)` on one thread per rank and returns their errors.
template <class Body>
std::vector<std::string> run_threads(int size, Body body) {
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] { errors[rank] = error_of([&] { body(rank); }); });
  for (auto& thread : threads) thread.join();
  return errors;
}

template <class Body>
std::vector<std::string> run_ranks(int size, Body body, milliseconds timeout = milliseconds(20000)) {
  const auto state = std::make_shared<comm::ThreadRendezvousState>(size);
  return run_threads(size, [&](int rank) {
    comm::ShmTransport transport(std::make_shared<comm::ThreadRendezvous>(state, rank, timeout));
    body(transport);
  });
}

}  // namespace weft::testing
