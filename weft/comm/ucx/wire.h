#pragma once
#include <cstdint>
#include <type_traits>
#include <vector>

#include "weft/comm/failure.h"
#include "weft/comm/store_exchange.h"
#include "weft/comm/transport.h"

// The wire format: three kinds of small messages, message tags, and the segments of a block.
namespace weft::comm::ucx {

inline constexpr uint32_t kWireVersion = 2;  // increment it with every change of the format
inline constexpr int kMaxRanks = 1 << 14;    // limited by the sender bits of a tag

/// Sent to each peer before the data of a collective. A received header is only compared, never used as a size.
struct Header {
  Token token{};
  uint64_t seq = 0;
  uint32_t op = 0;
  int32_t dtype = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  bool operator==(const Header&) const = default;
};
static_assert(sizeof(Header) == 48, "no padding: it is sent as bytes");

Header header(const Token& token, uint64_t seq, const CollectiveFingerprint& fingerprint);
/// The fingerprint of a received header, with a valid dtype, for error messages.
CollectiveFingerprint fingerprint(const Header& header);

/// Tells a peer that this rank has failed, and why. A received notice is only printed.
struct Notice {
  Token token{};
  Failure failure{};
};
static_assert(std::is_trivially_copyable_v<Notice>);

/// After a timeout a rank asks each peer which rank that peer waits for.
struct WaitQuery {
  static constexpr int32_t kNone = -1;
  Token token{};
  uint32_t is_reply = 0;
  int32_t waits_for = kNone;  // in a reply
};
static_assert(sizeof(WaitQuery) == 24, "no padding: it is sent as bytes");

/// Message tags. They are masked with the token, so that messages from outside the group match no receive.
uint64_t header_tag(const Token& token, uint64_t seq, int sender);
uint64_t segment_tag(const Token& token, uint64_t seq, int sender, uint64_t segment);
uint64_t notice_tag(const Token& token, int sender);
uint64_t wait_query_tag(const Token& token, int sender, bool reply);

/// Ends of the segments of a block, in rows: multiples of 32 except for the last. Segments are small where a rank may
/// wait for them: at the start of a block (nothing is on the wire yet) and at its end (nothing is left to compute).
std::vector<int64_t> segment_ends(int64_t rows, int64_t row_bytes);

}  // namespace weft::comm::ucx
