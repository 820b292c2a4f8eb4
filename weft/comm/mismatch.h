#pragma once
#include <c10/util/ArrayRef.h>

#include <string>

#include "weft/comm/transport.h"

namespace weft::comm {

/// The collective that a rank is about to run, and its sequence number on that rank.
struct SequencedFingerprint {
  int64_t seq = 0;
  CollectiveFingerprint fingerprint;
  bool operator==(const SequencedFingerprint&) const = default;
};

/// Empty if all ranks agree, otherwise "rank 0: … ; rank 1: …" with one rank per distinct collective. The text is the
/// same on every rank.
std::string describe_mismatch(c10::ArrayRef<SequencedFingerprint> by_rank);

}  // namespace weft::comm
