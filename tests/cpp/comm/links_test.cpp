#include "weft/comm/links.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/cpp/comm/thread_links.h"
#include "tests/cpp/thread_ranks.h"
#include "weft/comm/group.h"
#include "weft/comm/place.h"
#include "weft/comm/route.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::testing {
namespace {

using comm::choose;
using comm::link_of;
using comm::Transport;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// The values of all ranks, one each.
std::vector<float> gather_numbers(comm::Link& link, float mine) {
  const auto exchange = link.all_gather(at::full({1, 1}, mine));
  std::vector<float> all;
  for (int r = 0; r < link.size(); ++r) {
    if (r != link.rank()) exchange->wait(r, 1);
    all.push_back(r == link.rank() ? mine : *exchange->incoming(r).const_data_ptr<float>());
  }
  exchange->finish();
  return all;
}

TEST(Links, RanksOfOneHostShareMemoryAndKeepTheirLink) {
  const ThreadRanks ranks(3);
  ranks.run([](int rank, const std::string& name) {
    const auto found = link_of(name);
    TORCH_CHECK(found.link && found.link->name() == "shm" && found.reason.empty(), found.reason);
    TORCH_CHECK(gather_numbers(*found.link, rank) == std::vector<float>({0, 1, 2}), "wrong values");
    TORCH_CHECK(link_of(name).link == found.link, "another link");
  });
}

TEST(Links, TwoGroupsOfTheSameRanksHaveLinksOfTheirOwn) {
  const ThreadRanks ones(2), twos(2);
  ones.run([&](int rank, const std::string& name) {
    const auto one = link_of(name).link, two = link_of(twos.name(rank)).link;
    for (int i = 0; i < 20; ++i) {
      TORCH_CHECK(gather_numbers(*one, rank + i) == std::vector<float>({0.0F + i, 1.0F + i}), "wrong values");
      if (i % 3 == rank) std::this_thread::sleep_for(milliseconds(1));
      TORCH_CHECK(gather_numbers(*two, 10 * rank) == std::vector<float>({0, 10}), "wrong values");
    }
  });
}

TEST(Links, ALinkGoesWithItsGroup) {
  std::weak_ptr<comm::Link> link;
  {
    const ThreadRanks ranks(2);
    ranks.run([&](int rank, const std::string& name) {
      const auto found = link_of(name);
      if (rank == 0) link = found.link;
    });
    EXPECT_FALSE(link.expired());
  }
  const ThreadRanks others(2);  // entries of groups that are gone go when another is made
  others.run([](int, const std::string& name) { link_of(name); });
  EXPECT_TRUE(link.expired());
}

TEST(Links, AGroupOfOneRankHasNone) {
  const ThreadRanks ranks(1);
  const auto found = link_of(ranks.name(0));
  EXPECT_FALSE(found.link);
  EXPECT_EQ(found.reason, "the group has one rank");
}

TEST(Links, ARankThatDoesNotAskIsNamedAndTheFailureStays) {
  const ThreadRanks ranks(2, milliseconds(200));
  const auto first = error_of([&] { link_of(ranks.name(0)); });
  EXPECT_THAT(first, AllOf(HasSubstr("rank 1"), HasSubstr("no word in the Store within 200 ms")));
  EXPECT_EQ(error_of([&] { link_of(ranks.name(0)); }), first);
}

TEST(Links, AnUnknownGroupIsToldByName) {
  EXPECT_THAT(error_of([] { link_of("nobody"); }), HasSubstr("'nobody'"));
}

// ---- the choice ----------------------------------------------------------------------------------------------------

std::string says(const char* host, const char* asked, const char* no_ucx, int uid = 5) {
  return comm::Place{host, "pid:[1]", "net:[1]", static_cast<uid_t>(uid), 77}.text() + "\n" + asked + "\n" + no_ucx;
}

TEST(Links, TheTransportFollowsFromWhereTheRanksAre) {
  EXPECT_EQ(choose({says("a", "", "no"), says("a", "", "no")}).first, Transport::shm);
  EXPECT_EQ(choose({says("a", "", ""), says("b", "", "")}).first, Transport::ucx);
  EXPECT_EQ(choose({says("a", "", ""), says("a", "", "", 6)}).first, Transport::ucx);
  const auto [transport, reason] = choose({says("a", "", ""), says("b", "", "built without")});
  EXPECT_EQ(transport, Transport::plain);
  EXPECT_EQ(reason, "rank 1 is on another host than rank 0, and rank 1 has no UCX (built without)");
}

TEST(Links, ATransportThatWasAskedForIsTakenOrRefused) {
  EXPECT_EQ(choose({says("a", "plain", ""), says("a", "plain", "")}).first, Transport::plain);
  EXPECT_EQ(choose({says("a", "ucx", ""), says("a", "ucx", "")}).first, Transport::ucx);
  EXPECT_THAT(error_of([] { choose({says("a", "shm", ""), says("b", "shm", "")}); }),
              HasSubstr("rank 1 is on another host"));
  EXPECT_THAT(error_of([] { choose({says("a", "ucx", ""), says("b", "ucx", "no")}); }),
              HasSubstr("rank 1 has no UCX (no)"));
  EXPECT_THAT(error_of([] { choose({says("a", "shm", ""), says("a", "", "")}); }),
              HasSubstr("WEFT_TRANSPORT is 'shm' on rank 0 and '' on rank 1"));
}

// ---- one failure state, one thread --------------------------------------------------------------------------------

TEST(Links, AFailedLinkStopsTheGroupsCollectives) {
  const ThreadRanks ranks(2, milliseconds(5000));
  const auto x = at::full({2, 2}, 1.0);
  ranks.run([&](int rank, const std::string& name) {
    const auto link = link_of(name).link;
    EXPECT_THAT(error_of([&] { link->all_gather(at::full({2 + rank, 2}, 1.0))->finish(); }), HasSubstr("disagree"));
    const auto error = error_of([&] { comm::Group(name).all_gather(x).wait(); });
    EXPECT_THAT(error, AllOf(HasSubstr("cannot be used any more"), HasSubstr("disagree")));
    EXPECT_THAT(error_of([&] { link_of(name); }), HasSubstr("cannot be used any more"));
  });
}

TEST(Links, AFailedCollectiveStopsTheLink) {
  const ThreadRanks ranks(2, milliseconds(5000));
  ranks.run([&](int rank, const std::string& name) {
    const auto link = link_of(name).link;
    gather_numbers(*link, 1);
    error_of([&] { comm::Group(name).all_gather(at::full({2 + rank, 2}, 1.0)).wait(); });
    EXPECT_THAT(error_of([&] { link->all_gather(at::full({1, 1}, 1.0)); }), HasSubstr("cannot be used any more"));
  });
}

TEST(Links, ARoundThatIsDroppedFailsTheGroup) {
  const ThreadRanks ranks(2, milliseconds(5000));
  ranks.run([&](int, const std::string& name) {
    const auto link = link_of(name).link;
    link->all_gather(at::full({1, 1}, 1.0));
    EXPECT_THAT(error_of([&] { comm::Group(name).all_gather(at::full({1}, 1.0)).wait(); }), HasSubstr("given up"));
  });
}

TEST(Links, ASecondThreadIsRefusedWhileARoundIsOpen) {
  const ThreadRanks ranks(2, milliseconds(5000));
  ranks.run([&](int rank, const std::string& name) {
    const auto link = link_of(name).link;
    const auto other = [](const std::function<void()>& act) {
      std::string error;
      std::thread([&] { error = error_of(act); }).join();
      return error;
    };
    auto round = link->all_gather(at::full({1, 1}, 1.0));
    EXPECT_THAT(other([&] { link->all_gather(at::full({1, 1}, 1.0)); }), HasSubstr("in use by another thread"));
    EXPECT_THAT(other([&] { round->arrived(1 - rank); }), HasSubstr("in use by another thread"));
    round->wait(1 - rank, 1);
    round->finish();
    round.reset();
    EXPECT_EQ(other([&] { gather_numbers(*link, 1); }), "");  // one after the other is fine
  });
}

// ---- hosts and UCX --------------------------------------------------------------------------------------------------

TEST(Links, AHostWithoutIdentityIsEqualToNone) {
  auto a = comm::Place::here();
  EXPECT_EQ(comm::why_apart(a, a), "");
  for (auto field : {&comm::Place::boot, &comm::Place::pid_space, &comm::Place::net_space}) {
    auto b = a;
    b.*field = "unknown";
    EXPECT_NE(comm::why_apart(b, b), "");
  }
}

TEST(Links, UcxThatIsNotTrustedIsNotUsed) {
  const char* before = std::getenv("WEFT_UCX_TRUSTED");
  const std::string kept = before ? before : "";
  ::unsetenv("WEFT_UCX_TRUSTED");
  const auto why = comm::why_no_ucx();
  EXPECT_THAT(why, HasSubstr("WEFT_UCX_TRUSTED"));
  EXPECT_THAT(error_of([] { comm::make_ucx_link({nullptr, 0, 1, "tp", milliseconds(100)}); }),
              HasSubstr("WEFT_UCX_TRUSTED"));
  const auto [transport, reason] = choose({says("a", "", why.c_str()), says("b", "", why.c_str())});
  EXPECT_EQ(transport, Transport::plain);
  EXPECT_THAT(reason, HasSubstr("WEFT_UCX_TRUSTED"));
  EXPECT_THAT(error_of([&] { choose({says("a", "ucx", why.c_str()), says("b", "ucx", why.c_str())}); }),
              HasSubstr("WEFT_UCX_TRUSTED"));
  ::setenv("WEFT_UCX_TRUSTED", "yes", 1);
  EXPECT_THAT(error_of([] { comm::why_no_ucx(); }), HasSubstr("expected 0 or 1"));
  kept.empty() ? ::unsetenv("WEFT_UCX_TRUSTED") : ::setenv("WEFT_UCX_TRUSTED", kept.c_str(), 1);
}

TEST(Links, UcxThatOneRankCannotLoadIsUsedByNone) {
  const comm::Introductions said{says("a", "", ""), says("b", "", "")};
  EXPECT_EQ(comm::choose_loaded(said, {"", ""}).first, Transport::ucx);
  const auto [transport, reason] = comm::choose_loaded(said, {"", "no libucp"});
  EXPECT_EQ(transport, Transport::plain);
  EXPECT_THAT(reason, HasSubstr("rank 1 has no UCX (no libucp)"));
}

}  // namespace
}  // namespace weft::testing
