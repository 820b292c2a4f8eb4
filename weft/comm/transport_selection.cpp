#include "weft/comm/transport_selection.h"

#include <c10/util/Exception.h>

#include <sstream>

#include "weft/comm/host_identity.h"
#include "weft/comm/settings.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::comm {
namespace {

struct PeerInfo {
  HostIdentity host;
  std::string requested;  // WEFT_TRANSPORT; may be empty
  std::string no_ucx_reason;

  std::string text() const { return host.text() + "\n" + requested + "\n" + no_ucx_reason; }
  static PeerInfo parse(const std::string& text) {
    std::istringstream in(text);
    std::string host;
    PeerInfo info;
    std::getline(in, host);
    std::getline(in, info.requested);
    std::getline(in, info.no_ucx_reason, '\0');
    info.host = HostIdentity::parse(host);
    return info;
  }
};

/// "rank 2 cannot share memory with rank 0 (different host)", or empty.
std::string shm_unavailable_reason(const std::vector<PeerInfo>& ranks) {
  for (size_t r = 1; r < ranks.size(); ++r) {
    const auto reason = not_colocated_reason(ranks[0].host, ranks[r].host);
    if (!reason.empty()) return c10::str("rank ", r, " cannot share memory with rank 0 (", reason, ")");
  }
  return "";
}

std::string missing_ucx_reason(const std::vector<PeerInfo>& ranks) {
  for (size_t r = 0; r < ranks.size(); ++r)
    if (!ranks[r].no_ucx_reason.empty()) return c10::str("rank ", r, " cannot use UCX (", ranks[r].no_ucx_reason, ")");
  return "";
}

std::pair<TransportKind, std::string> select(const std::vector<PeerInfo>& ranks) {
  const auto& requested = ranks[0].requested;
  for (size_t r = 1; r < ranks.size(); ++r)
    if (ranks[r].requested != requested)
      C10_THROW_ERROR(DistError, c10::str("WEFT_TRANSPORT is '", requested, "' on rank 0 and '", ranks[r].requested,
                                          "' on rank ", r, ". Set the same value on all ranks, or unset it."));
  if (requested == "plain") return {TransportKind::plain, "WEFT_TRANSPORT is plain"};
  const auto no_shm_reason = shm_unavailable_reason(ranks), no_ucx_reason = missing_ucx_reason(ranks);
  if (requested == "shm" || (requested.empty() && no_shm_reason.empty())) {
    if (!no_shm_reason.empty()) C10_THROW_ERROR(DistError, "WEFT_TRANSPORT is shm, but " + no_shm_reason + ".");
    return {TransportKind::shm, ""};
  }
  if (requested == "ucx" && !no_ucx_reason.empty())
    C10_THROW_ERROR(DistError, "WEFT_TRANSPORT is ucx, but " + no_ucx_reason + ".");
  if (no_ucx_reason.empty()) return {TransportKind::ucx, ""};
  return {TransportKind::plain, no_shm_reason + ", and " + no_ucx_reason};
}

std::vector<PeerInfo> parse_all(const PeerInfoTexts& by_rank) {
  std::vector<PeerInfo> ranks;
  for (const auto& text : by_rank) ranks.push_back(PeerInfo::parse(text));
  return ranks;
}

}  // namespace

std::string local_peer_info() {
  return PeerInfo{HostIdentity::local(), transport_from_env(), ucx_unavailable_reason()}.text();
}

std::pair<TransportKind, std::string> select_transport(const PeerInfoTexts& by_rank) {
  return select(parse_all(by_rank));
}

std::pair<TransportKind, std::string> select_loaded_transport(const PeerInfoTexts& by_rank,
                                                              const std::vector<std::string>& load_errors) {
  auto ranks = parse_all(by_rank);
  for (size_t r = 0; r < ranks.size(); ++r) ranks[r].no_ucx_reason = load_errors[r];
  return select(ranks);
}

}  // namespace weft::comm
