#include "weft/comm/agreement.h"

#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <array>

namespace weft::comm {

std::string_view name(Operation operation) {
  static constexpr std::array<std::string_view, 8> kNames{
      "no operation", "all_gather", "reduce_scatter", "all_reduce", "grow", "barrier", "put_signal", "wait_signal"};
  const auto i = static_cast<size_t>(operation);
  return i < kNames.size() ? kNames[i] : "an unknown operation";
}

std::string text(const Agreement& about) {
  return c10::str(name(about.operation), " of [", about.rows, ", ", about.columns, "] ", c10::toString(about.dtype));
}

}  // namespace weft::comm
