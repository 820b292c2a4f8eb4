#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weft::ops {

/// The number of ranks of an operation: `size` if more than 1, else the size of the group. Raises ValueError if no
/// group is given. A given size is compared with the group at the first collective (comm::Group), because the group
/// need not exist yet.
int64_t resolve_group_size(std::string_view op, const std::optional<std::string>& group, int64_t size);

/// total / ranks. Raises ValueError if there is a remainder.
int64_t divide_evenly(std::string_view op, std::string_view what, int64_t total, int64_t ranks);

}  // namespace weft::ops
