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
  return f.rows < 0 ? c10::str(", to finish round ", f.seq - 2) : c10::str(", up to row ", f.rows);
}

}  // namespace

std::string text(const Failure& f) {
  const auto peer = f.pid ? c10::str("rank ", f.peer, " (pid ", f.pid, ")") : c10::str("rank ", f.peer);
  const auto where = is_signal(f.local.op) ? c10::str(" in ", name(f.local.op), ", channel ", f.seq)
                                           : c10::str(" in round ", f.seq, ", ", text(f.local));
  switch (f.reason) {
    case FailureReason::timeout:
      return c10::str("Rank ", f.reporter, " waited ", f.waited_ms, " ms for ", peer, where, awaited(f), ".");
    case FailureReason::peer_exited:
      return c10::str("Rank ", f.reporter, " needs ", peer, where, ", but its process has ended.");
    case FailureReason::mismatch:
      return c10::str("Ranks disagree in round ", f.seq, ": rank ", f.reporter, " does ", text(f.local), ", ", peer,
                      " ", text(f.remote),
                      ". Every rank must start the same operations with the same sizes and dtypes.");
    case FailureReason::protocol_error:
      return c10::str("Rank ", f.reporter, " read words of ", peer, " that make no sense", where, ".");
    case FailureReason::abandoned:
      return c10::str("Rank ", f.reporter, " gave up", where, f.note[0] ? ": " : ", because of an error of its own.",
                      std::string_view(f.note.data(), ::strnlen(f.note.data(), f.note.size())));
    case FailureReason::connection_lost:
      return c10::str("Rank ", f.reporter, " lost its connection to ", peer, where,
                      ": its process has ended, or its host cannot be reached.");
  }
  return c10::str("A rank failed", where, ".");
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
  // A writer that dies half-way leaves what it wrote; its values are only shown.
  for (int i = 0; i < 1000 && state_.load(std::memory_order_acquire) == 1; ++i)
    std::this_thread::sleep_for(std::chrono::microseconds(10));
  return failure_;
}

}  // namespace weft::comm
