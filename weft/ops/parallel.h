#pragma once
#include <cstdint>
#include <string_view>

namespace weft::ops {

/// Raises NotImplementedError if `size` ranks would share the operation: the tensor-parallel arguments are accepted for
/// a group of one rank only.
void refuse_parallel(std::string_view op, int64_t size);

}  // namespace weft::ops
