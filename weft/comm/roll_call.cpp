#include "weft/comm/roll_call.h"

#include <c10/util/Exception.h>

#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace weft::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const RollCall& call, int peer, const std::string& what) {
  C10_THROW_ERROR(DistError, c10::str("Rank ", call.rank, " of ", call.size, " at '", call.prefix, "', rank ", peer,
                                      ": ", what, "."));
}

/// What the Store answers; its errors get the number of the rank they concern.
template <class Question>
auto ask(const RollCall& call, int peer, Question&& question) {
  try {
    return question();
  } catch (const c10::Error& error) {
    fail(call, peer, std::string("the Store failed: ") + error.what_without_backtrace());
  }
}

/// Looks again and again: a wait inside the Store would see neither a dead peer nor a failure told elsewhere.
std::string read(c10d::Store& store, const RollCall& call, int peer, Clock::time_point deadline) {
  const auto key = c10::str(call.prefix, "/", peer);
  for (auto pause = milliseconds(1); !ask(call, peer, [&] { return store.check({key}); });
       pause = std::min(2 * pause, milliseconds(20))) {
    call.look(peer);
    if (Clock::now() > deadline)
      fail(call, peer, c10::str("no word in the Store within ", call.timeout.count(), " ms"));
    std::this_thread::sleep_for(pause);
  }
  return ask(call, peer, [&] { return store.get_to_str(key); });
}

}  // namespace

std::vector<std::string> call_roll(c10d::Store& store, const RollCall& call, const std::string& mine) {
  const auto deadline = Clock::now() + call.timeout;
  std::vector<std::string> all(call.size);
  ask(call, call.rank, [&] { store.set(c10::str(call.prefix, "/", call.rank), mine); });
  for (int peer = 0; peer < call.size; ++peer) all[peer] = peer == call.rank ? mine : read(store, call, peer, deadline);
  return all;
}

}  // namespace weft::comm
