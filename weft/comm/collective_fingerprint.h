#pragma once
#include <string>
#include <string_view>

#include "weft/comm/transport.h"

namespace weft::comm {

/// "all_gather"; any number may be given.
std::string_view name(CommOp op);
/// "all_gather of [128, 512] BFloat16"
std::string text(const CollectiveFingerprint& fingerprint);

}  // namespace weft::comm
