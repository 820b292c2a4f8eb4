#include "weft/comm/route.h"

#include <c10/util/Exception.h>

#include <sstream>

#include "weft/comm/place.h"
#include "weft/comm/settings.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::comm {
namespace {

struct Introduction {
  Place place;
  std::string asked;  // empty: nothing
  std::string no_ucx;

  std::string text() const { return place.text() + "\n" + asked + "\n" + no_ucx; }
  static Introduction parse(const std::string& text) {
    std::istringstream in(text);
    std::string place;
    Introduction said;
    std::getline(in, place);
    std::getline(in, said.asked);
    std::getline(in, said.no_ucx, '\0');
    said.place = Place::parse(place);
    return said;
  }
};

/// "rank 2 is on another host", or empty.
std::string why_no_shm(const std::vector<Introduction>& ranks) {
  for (size_t r = 1; r < ranks.size(); ++r) {
    const auto why = why_apart(ranks[0].place, ranks[r].place);
    if (!why.empty()) return c10::str("rank ", r, " is on ", why, " than rank 0");
  }
  return "";
}

std::string why_not_all_ucx(const std::vector<Introduction>& ranks) {
  for (size_t r = 0; r < ranks.size(); ++r)
    if (!ranks[r].no_ucx.empty()) return c10::str("rank ", r, " has no UCX (", ranks[r].no_ucx, ")");
  return "";
}

std::pair<Transport, std::string> choose(const std::vector<Introduction>& ranks) {
  const auto& asked = ranks[0].asked;
  for (size_t r = 1; r < ranks.size(); ++r)
    if (ranks[r].asked != asked)
      C10_THROW_ERROR(DistError, c10::str("WEFT_TRANSPORT is '", asked, "' on rank 0 and '", ranks[r].asked,
                                          "' on rank ", r, ". Set the same on all ranks, or none."));
  if (asked == "plain") return {Transport::plain, "WEFT_TRANSPORT is plain"};
  const auto no_shm = why_no_shm(ranks), no_ucx = why_not_all_ucx(ranks);
  if (asked == "shm" || (asked.empty() && no_shm.empty())) {
    if (!no_shm.empty()) C10_THROW_ERROR(DistError, "WEFT_TRANSPORT is shm, but " + no_shm + ".");
    return {Transport::shm, ""};
  }
  if (asked == "ucx" && !no_ucx.empty()) C10_THROW_ERROR(DistError, "WEFT_TRANSPORT is ucx, but " + no_ucx + ".");
  if (no_ucx.empty()) return {Transport::ucx, ""};
  return {Transport::plain, no_shm + ", and " + no_ucx};
}

std::vector<Introduction> parsed(const Introductions& by_rank) {
  std::vector<Introduction> ranks;
  for (const auto& text : by_rank) ranks.push_back(Introduction::parse(text));
  return ranks;
}

}  // namespace

std::string own_introduction() { return Introduction{Place::here(), given_transport(), why_no_ucx()}.text(); }

std::pair<Transport, std::string> choose(const Introductions& by_rank) { return choose(parsed(by_rank)); }

std::pair<Transport, std::string> choose_loaded(const Introductions& by_rank, const std::vector<std::string>& why_not) {
  auto ranks = parsed(by_rank);
  for (size_t r = 0; r < ranks.size(); ++r) ranks[r].no_ucx = why_not[r];
  return choose(ranks);
}

}  // namespace weft::comm
