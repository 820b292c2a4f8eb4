#pragma once
#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "weft/comm/failure.h"
#include "weft/comm/transport.h"

// What goes over the wire: three kinds of small messages, the tags of all, and how a block is cut.
namespace weft::comm::ucx {

inline constexpr uint32_t kWireVersion = 2;  // grows with every change of this file
inline constexpr int kMaxRanks = 1 << 14;    // a tag has room for so many

/// A secret of one group, made anew with each link: it tells a round of this group from any other's.
using Token = std::array<uint64_t, 2>;

/// Comes before the data of a round, from each rank to each peer. A received one is compared, never used.
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
/// What a received header announces, fit to be shown.
CollectiveFingerprint fingerprint(const Header& header);

/// Tells a peer that this rank has given up, and why. A received one is only shown.
struct Notice {
  Token token{};
  Failure failure{};
};
static_assert(std::is_trivially_copyable_v<Notice>);

/// A rank whose wait has timed out asks each peer whom it waits for itself; the answer says so.
struct WaitQuery {
  static constexpr int32_t kNone = -1;
  Token token{};
  uint32_t is_reply = 0;
  int32_t waits_for = kNone;  // of an answer
};
static_assert(sizeof(WaitQuery) == 24, "no padding: it is sent as bytes");

/// The tag of a message. Tags are veiled by the token, so that a stranger's messages match no receive.
uint64_t header_tag(const Token& token, uint64_t seq, int sender);
uint64_t segment_tag(const Token& token, uint64_t seq, int sender, uint64_t segment);
uint64_t notice_tag(const Token& token, int sender);
uint64_t wait_query_tag(const Token& token, int sender, bool reply);

/// Where the segments of a block end, in rows: multiples of 32 but for the last. They are small where a rank may be
/// waiting for them, at the beginning of a block (nothing is on the wire yet) and at its end (nothing is left to
/// compute).
std::vector<int64_t> segment_ends(int64_t rows, int64_t row_bytes);

}  // namespace weft::comm::ucx
