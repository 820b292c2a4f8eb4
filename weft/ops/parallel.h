#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weft::ops {

/// How many ranks share an operation: `size` if that is more than 1, else as many as the group has, which must be
/// named.
int64_t resolve_group_size(std::string_view op, const std::optional<std::string>& group, int64_t size);

/// total / ranks, which must come out even.
int64_t divide_evenly(std::string_view op, std::string_view what, int64_t total, int64_t ranks);

}  // namespace weft::ops
