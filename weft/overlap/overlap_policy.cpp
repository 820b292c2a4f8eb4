#include "weft/overlap/overlap_policy.h"

#include "weft/comm/transports.h"
#include "weft/overlap/clock.h"

namespace weft::overlap {

OverlapDecision decide_overlap(const std::string& group, const OverlapShape& shape, std::optional<bool> requested) {
  const auto found = comm::get_transport(group);
  OverlapDecision decision{.shape = shape, .rejection = found.reason};
  if (!found.transport) return decision;
  const comm::Group checked(group, shape.ranks);
  if (!requested.value_or(false)) {
    const auto measured = costs(found.transport, checked, shape.dtype);
    decision.predicted = predict(shape, measured, found.transport->zero_copy());
    decision.rejection = rejection_reason(shape, *decision.predicted, found.transport->zero_copy());
  }
  if (decision.rejection.empty()) decision.transport = found.transport;
  return decision;
}

std::string OverlapDecision::text(double elapsed) const {
  auto text = std::to_string(shape.ranks) + " x " + std::to_string(shape.rows) + " rows: ";
  text += transport ? "overlapped over " + std::string(transport->name()) : "plain collectives, because " + rejection;
  if (predicted)
    text += "; predicted " + format_ms(transport ? predicted->overlapped : predicted->plain) +
            (transport ? " (plain " + format_ms(predicted->plain) + ")" : "");
  return text + "; took " + format_ms(elapsed);
}

}  // namespace weft::overlap
