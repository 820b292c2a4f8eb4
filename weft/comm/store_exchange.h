#pragma once
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace weft::comm {

/// A random secret that ranks exchange through the Store: identifies the messages of their group.
using Token = std::array<uint64_t, 2>;
Token random_token();

struct StoreExchangeOptions {
  std::string prefix;  // of the keys; the same on all ranks, different for each exchange
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
  /// Called while waiting for rank `peer`; may raise.
  std::function<void(int peer)> poll = [](int) {};
};

/// All-gather of strings through the Store of a group: returns the string of each rank. A collective call. Raises
/// DistError, naming the missing rank, at the timeout or if the Store fails. The timeout also applies if the Store does
/// not respond.
std::vector<std::string> exchange_through_store(const c10::intrusive_ptr<c10d::Store>& store,
                                                const StoreExchangeOptions& options, const std::string& local);

/// Returns 0, 1, … : how often rank `options.rank` called this before with the prefix. The count is kept in the Store,
/// which may outlive processes and groups. Equal on all ranks if all make the same calls.
int64_t next_generation(const c10::intrusive_ptr<c10d::Store>& store, const StoreExchangeOptions& options);

}  // namespace weft::comm
