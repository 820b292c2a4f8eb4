#include "weft/overlap/overlap_policy.h"

#include "weft/comm/transports.h"
#include "weft/overlap/clock.h"

namespace weft::overlap {

std::shared_ptr<comm::Transport> OverlapPolicy::select(const std::string& group, const OverlapShape& shape,
                                                       std::optional<bool> requested) const {
  const auto found = comm::get_transport(group);
  Decision decision{.shape = shape, .detail = found.reason, .predicted = {}, .thread = std::this_thread::get_id()};
  if (!found.transport) {
    record(std::move(decision));
    return nullptr;
  }
  if (!requested.value_or(false)) {
    const auto measured = costs(found.transport, comm::Group(group), group, shape.dtype);
    decision.predicted = predict(shape, measured, found.transport->zero_copy());
    decision.detail = rejection_reason(shape, *decision.predicted, found.transport->zero_copy());
  }
  decision.overlapped = decision.detail.empty();
  if (decision.overlapped) decision.detail = found.transport->name();
  const bool overlapped = decision.overlapped;
  record(std::move(decision));
  return overlapped ? found.transport : nullptr;
}

void OverlapPolicy::record(Decision decision) const {
  const std::lock_guard lock(log_->mutex);
  log_->decision = std::move(decision);
}

OverlapPolicy::ScopedTimer::ScopedTimer(const OverlapPolicy& policy) : policy_(policy), start_(now()) {}

OverlapPolicy::ScopedTimer::~ScopedTimer() {
  const std::lock_guard lock(policy_.log_->mutex);
  auto& decision = policy_.log_->decision;
  if (decision && decision->thread == std::this_thread::get_id())
    decision->elapsed = now() - start_;  // otherwise the decision belongs to a call of another thread
}

std::string OverlapPolicy::last_decision() const {
  const std::lock_guard lock(log_->mutex);
  if (!log_->decision) return {};
  const auto& [shape, detail, overlapped, predicted, elapsed, thread] = *log_->decision;
  auto text = std::to_string(shape.ranks) + " x " + std::to_string(shape.rows) +
              " rows: " + (overlapped ? "overlapped over " + detail : "plain collectives, because " + detail);
  if (predicted)
    text += "; predicted " + format_ms(overlapped ? predicted->overlapped : predicted->plain) +
            (overlapped ? " (plain " + format_ms(predicted->plain) + ")" : "");
  return text + "; took " + format_ms(elapsed);
}

}  // namespace weft::overlap
