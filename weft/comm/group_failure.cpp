#include "weft/comm/group_failure.h"

#include <c10/util/Exception.h>

namespace weft::comm {

void GroupFailure::put(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return;
  reason_ = reason;
  failed_.store(true, std::memory_order_release);
}

void GroupFailure::throw_failed() const {
  const std::lock_guard lock(mutex_);
  C10_THROW_ERROR(DistError, "Group '" + group_ +
                                 "' cannot be used any more: destroy it and create a new one. First error: " + reason_);
}

}  // namespace weft::comm
