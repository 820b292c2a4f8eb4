#pragma once
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace weft::comm {

struct StoreExchangeOptions {
  std::string prefix;  // of the keys: the same on all ranks, and new for each call
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
  /// Called while rank `peer` is waited for; may raise.
  std::function<void(int peer)> poll = [](int) {};
};

/// Tells `local` to all ranks through the Store of their group, and gives what each of them tells. Every rank calls
/// this. Raises DistError, with the number of the rank that is missing, at the timeout or when the Store fails. The
/// timeout holds also if the Store does not answer.
std::vector<std::string> exchange_through_store(const c10::intrusive_ptr<c10d::Store>& store,
                                                const StoreExchangeOptions& options, const std::string& local);

/// How often rank `options.rank` asked for this prefix before, counted in the Store, which may outlive processes and
/// groups. Equal on all ranks if each asks whenever the others do.
int64_t next_generation(const c10::intrusive_ptr<c10d::Store>& store, const StoreExchangeOptions& options);

}  // namespace weft::comm
