#include "weft/comm/roll_call.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "weft/comm/bounded_call.h"

namespace weft::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Store = c10::intrusive_ptr<c10d::Store>;

[[noreturn]] void fail(const RollCall& call, int peer, const std::string& what) {
  C10_THROW_ERROR(DistError, c10::str("Rank ", call.rank, " of ", call.size, " at '", call.prefix, "', rank ", peer,
                                      ": ", what, "."));
}

/// What the thread that talks to the Store and the thread that waits for it share.
struct Talk {
  Store store;
  std::atomic<int> peer = 0;        // whose word is awaited
  std::atomic<bool> asking = true;  // the Store has not answered yet
  std::atomic<bool> stopped = false;
  std::vector<std::string> words = {};  // of each rank; for the waiting thread once the talk is over
  int64_t count = 0;                    // likewise

  template <class Question>
  auto ask(Question&& question) {
    asking = true;
    auto answer = question();
    asking = false;
    return answer;
  }
  void read(int from, const std::string& key);
};

/// Looks again and again: a wait inside the Store would see no failure that is told elsewhere.
void Talk::read(int from, const std::string& key) {
  peer = from;
  for (auto pause = milliseconds(1); !ask([&] { return store->check({key}); });
       pause = std::min(2 * pause, milliseconds(20))) {
    if (stopped) return;
    std::this_thread::sleep_for(pause);
  }
  words[from] = ask([&] { return store->get_to_str(key); });
}

/// Runs `act(talk)` until the timeout; errors get the number of the rank they concern.
template <class Act>
std::shared_ptr<Talk> talk_to(const Store& store, const RollCall& call, Act&& act) {
  const std::shared_ptr<Talk> talk(new Talk{.store = store, .peer = call.rank});
  const auto failure = std::make_shared<std::string>();
  const auto guarded = [talk, failure, act = std::forward<Act>(act)] {
    try {
      act(*talk);
    } catch (const c10::Error& error) {
      *failure = error.what_without_backtrace();
    } catch (const std::exception& error) {
      *failure = error.what();
    }
  };
  struct Stop {  // also if `look` raises
    Talk& talk;
    ~Stop() { talk.stopped = true; }
  } const stop{*talk};
  const auto look = [&] {
    if (const int peer = talk->peer; peer != call.rank) call.look(peer);
  };
  if (!finish_by(Clock::now() + call.timeout, guarded, look))
    fail(call, talk->peer,
         c10::str(talk->asking ? "the Store does not answer" : "no word in the Store", " within ", call.timeout.count(),
                  " ms"));
  if (!failure->empty()) fail(call, talk->peer, "the Store failed: " + *failure);
  return talk;
}

}  // namespace

std::vector<std::string> call_roll(const Store& store, const RollCall& call, const std::string& mine) {
  const auto talk = talk_to(store, call, [mine, prefix = call.prefix, rank = call.rank, size = call.size](Talk& talk) {
    talk.words.resize(size);
    talk.words[rank] = mine;
    talk.store->set(c10::str(prefix, "/", rank), mine);
    for (int peer = 0; peer < size && !talk.stopped; ++peer)
      if (peer != rank) talk.read(peer, c10::str(prefix, "/", peer));
  });
  return std::move(talk->words);
}

int64_t next_generation(const Store& store, const RollCall& call) {
  const auto key = c10::str(call.prefix, "/generation/", call.rank);
  return talk_to(store, call, [key](Talk& talk) { talk.count = talk.store->add(key, 1); })->count - 1;
}

}  // namespace weft::comm
