#include "weft/comm/store_exchange.h"

#include <c10/util/Exception.h>
#include <sys/random.h>

#include <atomic>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "weft/comm/run_with_deadline.h"

namespace weft::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Store = c10::intrusive_ptr<c10d::Store>;

[[noreturn]] void fail(const StoreExchangeOptions& options, int peer, const std::string& what) {
  C10_THROW_ERROR(DistError, c10::str("Rank ", options.rank, " of ", options.size, ", store exchange '", options.prefix,
                                      "', rank ", peer, ": ", what, "."));
}

/// Shared by the thread that calls the Store and the thread that waits for it.
struct StoreSession {
  Store store;
  std::atomic<int> peer = 0;                // rank whose value is awaited
  std::atomic<bool> awaiting_reply = true;  // a Store call is running
  std::atomic<bool> stopped = false;
  std::vector<std::string> values = {};  // by rank; the waiting thread reads it after the calls have ended
  int64_t count = 0;                     // likewise
  std::string error = {};                // of the calls; likewise

  template <class Query>
  auto request(Query&& query) {
    awaiting_reply = true;
    auto reply = query();
    awaiting_reply = false;
    return reply;
  }
  void read(const std::vector<std::string>& keys, int rank);
};

/// Reads the values of all ranks. Looks for twice as many keys after each request that finds all of its keys, and for
/// half as many after one that does not, so that the number of requests is O(log ranks) for each rank that is late, and
/// one every 20 ms while it waits.
/// Polls, because a blocking wait inside the Store would not see `stopped`.
void StoreSession::read(const std::vector<std::string>& keys, int rank) {
  auto pause = milliseconds(1);
  size_t count = 1;
  for (auto next = keys.begin(); next != keys.end();) {
    if (stopped) return;
    const auto first = static_cast<int>(next - keys.begin());
    peer = first == rank && next + 1 != keys.end() ? first + 1 : first;
    count = std::min(count, static_cast<size_t>(keys.end() - next));
    if (const auto end = next + static_cast<std::ptrdiff_t>(count);
        request([&] { return store->check({next, end}); })) {
      next = end;
      count *= 2;
      pause = milliseconds(1);
    } else if (count > 1) {
      count /= 2;
    } else {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, milliseconds(20));
    }
  }
  for (const auto& value : request([&] { return store->multiGet(keys); }))
    values.emplace_back(value.begin(), value.end());
}

/// Runs `fn(session)` with the timeout; errors name the rank that was waited for.
template <class Fn>
std::shared_ptr<StoreSession> run_session(const Store& store, const StoreExchangeOptions& options, Fn&& fn) {
  const std::shared_ptr<StoreSession> session(new StoreSession{.store = store, .peer = options.rank});
  const auto guarded = [session, fn = std::forward<Fn>(fn)] {
    try {
      fn(*session);
    } catch (const c10::Error& error) {
      session->error = error.what_without_backtrace();
    } catch (const std::exception& error) {
      session->error = error.what();
    }
  };
  struct Stop {  // a destructor, so that it also runs if `poll` raises
    StoreSession& session;
    ~Stop() { session.stopped = true; }
  } const stop{*session};
  const auto poll = [&] {
    if (const int peer = session->peer; peer != options.rank) options.poll(peer);
  };
  if (!run_with_deadline(Clock::now() + options.timeout, guarded, poll))
    fail(options, session->peer,
         c10::str(session->awaiting_reply ? "the Store does not respond" : "no value in the Store", " within ",
                  options.timeout.count(), " ms"));
  if (!session->error.empty()) fail(options, session->peer, "the Store failed: " + session->error);
  return session;
}

}  // namespace

Token random_token() {
  Token token{};
  if (::getrandom(token.data(), sizeof(token), 0) != sizeof(token))
    C10_THROW_ERROR(DistError, "getrandom() failed: cannot create a token.");
  return token;
}

std::vector<std::string> exchange_through_store(const Store& store, const StoreExchangeOptions& options,
                                                const std::string& local) {
  const auto session =
      run_session(store, options,
                  [local, prefix = options.prefix, rank = options.rank, size = options.size](StoreSession& session) {
                    std::vector<std::string> keys;
                    for (int peer = 0; peer < size; ++peer) keys.push_back(c10::str(prefix, "/", peer));
                    session.store->set(keys[rank], local);
                    session.read(keys, rank);
                  });
  return std::move(session->values);
}

int64_t next_generation(const Store& store, const StoreExchangeOptions& options) {
  const auto key = c10::str(options.prefix, "/generation/", options.rank);
  return run_session(store, options, [key](StoreSession& session) { session.count = session.store->add(key, 1); })
             ->count -
         1;
}

}  // namespace weft::comm
