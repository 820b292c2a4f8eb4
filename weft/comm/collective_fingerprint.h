#pragma once
#include <string>
#include <string_view>

#include "weft/comm/transport.h"

namespace weft::comm {

/// "all_gather"; "unknown operation" for a value outside the enum.
std::string_view name(CommOp op);
/// "all_gather of [128, 512] bfloat16"
std::string text(const CollectiveFingerprint& fingerprint);

}  // namespace weft::comm
