#include "weft/comm/collective_fingerprint.h"

#include <c10/util/StringUtil.h>

#include <array>

#include "weft/core/value.h"

namespace weft::comm {

std::string_view name(CommOp op) {
  static constexpr std::array<std::string_view, 7> kOpNames{
      "no operation", "all_gather", "reduce_scatter", "all_reduce", "barrier", "put_signal", "wait_signal"};
  const auto i = static_cast<size_t>(op);
  return i < kOpNames.size() ? kOpNames[i] : "unknown operation";
}

std::string text(const CollectiveFingerprint& fingerprint) {
  return c10::str(name(fingerprint.op), " of [", fingerprint.rows, ", ", fingerprint.columns, "] ",
                  dtype_name(fingerprint.dtype));
}

}  // namespace weft::comm
