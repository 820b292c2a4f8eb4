#include "weft/comm/failure.h"

#include <c10/util/StringUtil.h>

#include <cstring>
#include <thread>

#include "weft/comm/collective_fingerprint.h"

namespace weft::comm {
namespace {

bool is_signal(CommOp op) { return op == CommOp::barrier || op == CommOp::put_signal || op == CommOp::wait_signal; }

std::string awaited(const Failure& f) {
  if (is_signal(f.local.op)) return "";
  return f.rows < 0 ? c10::str(", to finish collective ", f.seq - 2) : c10::str(", up to row ", f.rows);
}

}  // namespace

std::string text(const Failure& f) {
  const auto peer = f.pid ? c10::str("rank ", f.peer, " (pid ", f.pid, ")") : c10::str("rank ", f.peer);
  const auto what = is_signal(f.local.op) ? c10::str(name(f.local.op), ", channel ", f.seq)
                                          : c10::str("collective ", f.seq, " (", text(f.local), ")");
  switch (f.reason) {
    case FailureReason::timeout:
      return c10::str("Rank ", f.reporter, " waited ", f.waited_ms, " ms for ", peer, " in ", what, awaited(f),
                      ". If that rank is only slow, set a longer timeout (WEFT_TIMEOUT, in seconds).");
    case FailureReason::peer_exited:
      return c10::str("Rank ", f.reporter, " waited for ", peer, " in ", what, ", but its process has exited.");
    case FailureReason::mismatch:
      return c10::str("Mismatch in collective ", f.seq, ": rank ", f.reporter, " runs ", text(f.local), ", ", peer,
                      " runs ", text(f.remote),
                      ". Every rank must run the same collectives in the same order, with the same sizes and dtypes.");
    case FailureReason::protocol_error:
      return c10::str("Protocol error: rank ", f.reporter, " got invalid data from ", peer, " in ", what, ".");
    case FailureReason::abandoned:
      return c10::str("Rank ", f.reporter, " abandoned ", what, f.note[0] ? ": " : " before it finished.",
                      std::string_view(f.note.data(), ::strnlen(f.note.data(), f.note.size())));
    case FailureReason::connection_lost:
      return c10::str("Rank ", f.reporter, " lost its connection to ", peer, " in ", what,
                      ": its process has exited, or its host is unreachable.");
  }
  return c10::str("A rank failed in ", what, ".");
}

void Failure::set_note(std::string_view message) {
  note = {};
  message.copy(note.data(), note.size() - 1);
}

void StickyError::put(const Failure& failure) {
  uint32_t none = 0;
  if (!state_.compare_exchange_strong(none, 1, std::memory_order_relaxed)) return;
  failure_ = failure;
  state_.store(2, std::memory_order_release);
}

Failure StickyError::get() const {
  // The writer may have died while writing. A partly written Failure is safe: it is only printed.
  for (int i = 0; i < 1000 && state_.load(std::memory_order_acquire) == 1; ++i)
    std::this_thread::sleep_for(std::chrono::microseconds(10));
  return failure_;
}

}  // namespace weft::comm
