#pragma once
#include <c10/util/ArrayRef.h>

#include <string>

#include "weft/comm/transport.h"

namespace weft::comm {

/// What one rank is about to do, and the how many-th collective of the group that is to it.
struct SequencedFingerprint {
  int64_t seq = 0;
  CollectiveFingerprint fingerprint;
  bool operator==(const SequencedFingerprint&) const = default;
};

/// Who says what, if not all ranks say the same; else empty. Equal on every rank.
std::string describe_mismatch(c10::ArrayRef<SequencedFingerprint> by_rank);

}  // namespace weft::comm
