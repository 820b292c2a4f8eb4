#include "weft/ops/parallel.h"

#include <c10/util/Exception.h>

namespace weft::ops {

void refuse_parallel(std::string_view op, int64_t size) {
  TORCH_CHECK_VALUE(size >= 1, op, ": the size of the group is ", size, ", expected 1 or more.");
  TORCH_CHECK_NOT_IMPLEMENTED(size == 1, op, ": the process group has ", size,
                              " ranks; this version runs groups of one rank only. Leave the parallel arguments unset, "
                              "or pass a group of one rank.");
}

}  // namespace weft::ops
