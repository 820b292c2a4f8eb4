#include "weft/overlap/overlap_policy.h"

#include "weft/comm/transports.h"
#include "weft/overlap/clock.h"

namespace weft::overlap {

std::shared_ptr<comm::Transport> OverlapPolicy::select(const std::string& group, const OverlapShape& shape,
                                                       std::optional<bool> requested) const {
  const auto found = comm::get_transport(group);
  Decision decision{.shape = shape, .detail = found.reason, .predicted = {}};
  if (found.transport && !requested.value_or(false)) {
    const auto measured = costs(found.transport, comm::Group(group), shape.dtype);
    decision.predicted = predict(shape, measured, found.transport->zero_copy());
    decision.detail = rejection_reason(shape, *decision.predicted, found.transport->zero_copy());
  }
  auto selected = decision.detail.empty() ? found.transport : nullptr;
  decision.overlapped = selected != nullptr;
  if (selected) decision.detail = selected->name();
  const std::lock_guard lock(log_->mutex);
  log_->decision = std::move(decision);
  return selected;
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
