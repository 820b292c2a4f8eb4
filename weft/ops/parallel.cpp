#include "weft/ops/parallel.h"

#include <c10/util/Exception.h>

#include "weft/comm/group.h"

namespace weft::ops {

int64_t resolve_group_size(std::string_view op, const std::optional<std::string>& group, int64_t size) {
  TORCH_CHECK_VALUE(size >= 1, op, ": process group size is ", size, ", expected 1 or more.");
  TORCH_CHECK_VALUE(group, op, ": expected a process group (tensor_parallel_group or process_group), got none.");
  return size == 1 ? comm::Group(*group).size() : size;
}

int64_t divide_evenly(std::string_view op, std::string_view what, int64_t total, int64_t ranks) {
  TORCH_CHECK_VALUE(total % ranks == 0, op, ": ", what, " ", total, " does not divide over ", ranks, " ranks.");
  return total / ranks;
}

}  // namespace weft::ops
