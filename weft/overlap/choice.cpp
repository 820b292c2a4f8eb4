#include "weft/overlap/choice.h"

#include "weft/comm/links.h"
#include "weft/overlap/clock.h"

namespace weft::overlap {

std::shared_ptr<comm::Link> Choice::link(const std::string& group, const Shape& shape,
                                         std::optional<bool> asked) const {
  const auto found = comm::link_of(group);
  Last last{.shape = shape, .how = found.reason, .predicted = {}, .thread = std::this_thread::get_id()};
  if (!found.link) {
    remember(std::move(last));
    return nullptr;
  }
  if (!asked.value_or(false)) {
    const auto known = costs(found.link, comm::Group(group), group, shape.dtype);
    last.predicted = predict(shape, known, found.link->in_place());
    last.how = refuse(shape, *last.predicted, found.link->in_place());
  }
  last.overlapped = last.how.empty();
  if (last.overlapped) last.how = found.link->name();
  const bool overlapped = last.overlapped;
  remember(std::move(last));
  return overlapped ? found.link : nullptr;
}

void Choice::remember(Last last) const {
  const std::lock_guard lock(log_->mutex);
  log_->last = std::move(last);
}

Choice::Watch::Watch(const Choice& choice) : choice_(choice), start_(now()) {}

Choice::Watch::~Watch() {
  const std::lock_guard lock(choice_.log_->mutex);
  auto& last = choice_.log_->last;
  if (last && last->thread == std::this_thread::get_id()) last->took = now() - start_;  // else it is another call's
}

std::string Choice::last() const {
  const std::lock_guard lock(log_->mutex);
  if (!log_->last) return {};
  const auto& [shape, how, overlapped, predicted, took, thread] = *log_->last;
  auto text = std::to_string(shape.ranks) + " x " + std::to_string(shape.rows) +
              " rows: " + (overlapped ? "overlapped by " + how : "plain, since " + how);
  if (predicted)
    text += "; predicted " + milliseconds(overlapped ? predicted->overlapped : predicted->plain) +
            (overlapped ? " (plain " + milliseconds(predicted->plain) + ")" : "");
  return text + "; took " + milliseconds(took);
}

}  // namespace weft::overlap
