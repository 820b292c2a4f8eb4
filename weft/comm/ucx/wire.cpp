#include "weft/comm/ucx/wire.h"

#include <algorithm>

namespace weft::comm::ucx {
namespace {

// A tag, from the high bits: kind (2 bits), sender (14), segment (24), seq (24). At most two collectives are open, so
// that seq may wrap around.
constexpr uint64_t kHeader = 0, kSegment = 1, kNotice = 2, kWaitQuery = 3;
constexpr uint64_t k24Bits = (uint64_t{1} << 24) - 1;

uint64_t tag(const Token& token, uint64_t kind, int sender, uint64_t segment, uint64_t seq) {
  const uint64_t unmasked = kind << 62 | uint64_t(sender) << 48 | segment << 24 | (seq & k24Bits);
  return unmasked ^ token[0];
}

}  // namespace

Header header(const Token& token, uint64_t seq, const CollectiveFingerprint& f) {
  return {token, seq, static_cast<uint32_t>(f.op), static_cast<int32_t>(f.dtype), f.rows, f.columns};
}

CollectiveFingerprint fingerprint(const Header& h) {
  const bool known = h.dtype >= 0 && h.dtype < static_cast<int32_t>(at::ScalarType::NumOptions);
  const auto dtype = known ? static_cast<at::ScalarType>(h.dtype) : at::ScalarType::Undefined;
  return {static_cast<CommOp>(h.op), dtype, h.rows, h.columns};
}

uint64_t header_tag(const Token& token, uint64_t seq, int sender) { return tag(token, kHeader, sender, 0, seq); }

uint64_t segment_tag(const Token& token, uint64_t seq, int sender, uint64_t segment) {
  return tag(token, kSegment, sender, segment, seq);
}

uint64_t notice_tag(const Token& token, int sender) { return tag(token, kNotice, sender, 0, 0); }

uint64_t wait_query_tag(const Token& token, int sender, bool reply) { return tag(token, kWaitQuery, sender, reply, 0); }

/// A segment has a quarter of the rows before it or of the rows left, whichever are fewer: sizes grow, then shrink.
std::vector<int64_t> segment_ends(int64_t rows, int64_t row_bytes) {
  constexpr int64_t kMinBytes = 32 << 10, kMaxBytes = 512 << 10, kRowMultiple = 32;
  std::vector<int64_t> ends;
  if (row_bytes == 0) return ends;
  for (int64_t row = 0; row < rows; ends.push_back(row)) {
    const int64_t bytes = std::clamp(std::min(row, rows - row) * row_bytes / 4, kMinBytes, kMaxBytes);
    const int64_t multiples = std::max<int64_t>(bytes / (row_bytes * kRowMultiple), 1);
    row = std::min(rows, row + multiples * kRowMultiple);
  }
  return ends;
}

}  // namespace weft::comm::ucx
