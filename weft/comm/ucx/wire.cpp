#include "weft/comm/ucx/wire.h"

#include <algorithm>

namespace weft::comm::ucx {
namespace {

// kind 2 bits | sender 14 | segment 24 | epoch 24. Two rounds are open at most, so that an epoch may come round again.
constexpr uint64_t kHeader = 0, kSegment = 1, kNotice = 2, kInquiry = 3;
constexpr uint64_t k24Bits = (uint64_t{1} << 24) - 1;

uint64_t tag(const Token& token, uint64_t kind, int sender, uint64_t segment, uint64_t epoch) {
  const uint64_t plain = kind << 62 | uint64_t(sender) << 48 | segment << 24 | (epoch & k24Bits);
  return plain ^ token[0];
}

}  // namespace

Header header(const Token& token, uint64_t epoch, const Agreement& a) {
  return {token, epoch, static_cast<uint32_t>(a.operation), static_cast<int32_t>(a.dtype), a.rows, a.columns};
}

Agreement agreement(const Header& h) {
  const bool known = h.dtype >= 0 && h.dtype < static_cast<int32_t>(at::ScalarType::NumOptions);
  const auto dtype = known ? static_cast<at::ScalarType>(h.dtype) : at::ScalarType::Undefined;
  return {static_cast<Operation>(h.operation), dtype, h.rows, h.columns};
}

uint64_t header_tag(const Token& token, uint64_t epoch, int sender) { return tag(token, kHeader, sender, 0, epoch); }

uint64_t segment_tag(const Token& token, uint64_t epoch, int sender, uint64_t segment) {
  return tag(token, kSegment, sender, segment, epoch);
}

uint64_t notice_tag(const Token& token, int sender) { return tag(token, kNotice, sender, 0, 0); }

uint64_t inquiry_tag(const Token& token, int sender, bool answer) { return tag(token, kInquiry, sender, answer, 0); }

std::vector<int64_t> segment_ends(int64_t rows, int64_t row_bytes) {
  constexpr int64_t kLeast = 32 << 10, kMost = 512 << 10, kTile = 32;
  std::vector<int64_t> ends;
  if (row_bytes == 0) return ends;
  for (int64_t at = 0; at < rows; ends.push_back(at)) {
    const int64_t bytes = std::clamp(std::min(at, rows - at) * row_bytes / 4, kLeast, kMost);
    const int64_t tiles = std::max<int64_t>(bytes / (row_bytes * kTile), 1);
    at = std::min(rows, at + tiles * kTile);
  }
  return ends;
}

}  // namespace weft::comm::ucx
