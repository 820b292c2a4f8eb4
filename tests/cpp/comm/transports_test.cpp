#include "weft/comm/transports.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/cpp/comm/thread_transports.h"
#include "tests/cpp/thread_ranks.h"
#include "weft/comm/group.h"
#include "weft/comm/host_identity.h"
#include "weft/comm/transport_selection.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::testing {
namespace {

using comm::get_transport;
using comm::select_transport;
using comm::TransportKind;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// All-gather of one number per rank.
std::vector<float> gather_numbers(comm::Transport& transport, float local) {
  const auto collective = transport.all_gather(at::full({1, 1}, local));
  std::vector<float> all;
  for (int r = 0; r < transport.size(); ++r) {
    if (r != transport.rank()) collective->wait(r, 1);
    all.push_back(r == transport.rank() ? local : *collective->incoming(r).const_data_ptr<float>());
  }
  collective->finish();
  return all;
}

TEST(Transports, RanksOnOneHostUseShmAndKeepTheirTransport) {
  const ThreadRanks ranks(3);
  ranks.run([](int rank, const std::string& name) {
    const auto found = get_transport(name);
    TORCH_CHECK(found.transport && found.transport->name() == "shm" && found.reason.empty(), found.reason);
    TORCH_CHECK(gather_numbers(*found.transport, rank) == std::vector<float>({0, 1, 2}), "wrong values");
    TORCH_CHECK(get_transport(name).transport == found.transport, "another transport");
  });
}

TEST(Transports, GroupsOfTheSameRanksHaveSeparateTransports) {
  const ThreadRanks ones(2), twos(2);
  ones.run([&](int rank, const std::string& name) {
    const auto one = get_transport(name).transport, two = get_transport(twos.name(rank)).transport;
    for (int i = 0; i < 20; ++i) {
      TORCH_CHECK(gather_numbers(*one, rank + i) == std::vector<float>({0.0F + i, 1.0F + i}), "wrong values");
      if (i % 3 == rank) std::this_thread::sleep_for(milliseconds(1));
      TORCH_CHECK(gather_numbers(*two, 10 * rank) == std::vector<float>({0, 10}), "wrong values");
    }
  });
}

TEST(Transports, TransportIsReleasedWithItsGroup) {
  std::weak_ptr<comm::Transport> transport;
  {
    const ThreadRanks ranks(2);
    ranks.run([&](int rank, const std::string& name) {
      const auto found = get_transport(name);
      if (rank == 0) transport = found.transport;
    });
    EXPECT_FALSE(transport.expired());
  }
  const ThreadRanks others(2);  // creating a transport removes the entries of destroyed groups
  others.run([](int, const std::string& name) { get_transport(name); });
  EXPECT_TRUE(transport.expired());
}

TEST(Transports, SingleRankGroupHasNone) {
  const ThreadRanks ranks(1);
  const auto found = get_transport(ranks.name(0));
  EXPECT_FALSE(found.transport);
  EXPECT_EQ(found.reason, "the group has one rank");
}

TEST(Transports, AbsentRankIsNamedAndErrorIsSticky) {
  const ThreadRanks ranks(2, milliseconds(200));
  const auto first = error_of([&] { get_transport(ranks.name(0)); });
  EXPECT_THAT(first, AllOf(HasSubstr("rank 1"), HasSubstr("no value in the Store within 200 ms")));
  EXPECT_EQ(error_of([&] { get_transport(ranks.name(0)); }), first);
}

TEST(Transports, UnknownGroupIsNamed) {
  EXPECT_THAT(error_of([] { get_transport("nobody"); }), HasSubstr("'nobody'"));
}

// ---- selection -----------------------------------------------------------------------------------------------------

std::string peer_info(const char* host, const char* requested, const char* no_ucx_reason, int uid = 5) {
  return comm::HostIdentity{host, "pid:[1]", "net:[1]", static_cast<uid_t>(uid), 77}.text() + "\n" + requested + "\n" +
         no_ucx_reason;
}

TEST(Transports, SelectionFollowsHostIdentity) {
  EXPECT_EQ(select_transport({peer_info("a", "", "no"), peer_info("a", "", "no")}).first, TransportKind::shm);
  EXPECT_EQ(select_transport({peer_info("a", "", ""), peer_info("b", "", "")}).first, TransportKind::ucx);
  EXPECT_EQ(select_transport({peer_info("a", "", ""), peer_info("a", "", "", 6)}).first, TransportKind::ucx);
  const auto [kind, reason] = select_transport({peer_info("a", "", ""), peer_info("b", "", "built without")});
  EXPECT_EQ(kind, TransportKind::plain);
  EXPECT_EQ(reason,
            "rank 1 cannot share memory with rank 0 (different host), and rank 1 cannot use UCX (built without)");
}

TEST(Transports, RequestedTransportIsUsedOrRejected) {
  EXPECT_EQ(select_transport({peer_info("a", "plain", ""), peer_info("a", "plain", "")}).first, TransportKind::plain);
  EXPECT_EQ(select_transport({peer_info("a", "ucx", ""), peer_info("a", "ucx", "")}).first, TransportKind::ucx);
  EXPECT_THAT(error_of([] { select_transport({peer_info("a", "shm", ""), peer_info("b", "shm", "")}); }),
              HasSubstr("rank 1 cannot share memory with rank 0 (different host)"));
  EXPECT_THAT(error_of([] { select_transport({peer_info("a", "ucx", ""), peer_info("b", "ucx", "no")}); }),
              HasSubstr("rank 1 cannot use UCX (no)"));
  EXPECT_THAT(error_of([] { select_transport({peer_info("a", "shm", ""), peer_info("a", "", "")}); }),
              HasSubstr("WEFT_TRANSPORT is 'shm' on rank 0 and '' on rank 1"));
}

// ---- one failure state, one thread --------------------------------------------------------------------------------

TEST(Transports, FailedTransportFailsGroup) {
  const ThreadRanks ranks(2, milliseconds(5000));
  const auto x = at::full({2, 2}, 1.0);
  ranks.run([&](int rank, const std::string& name) {
    const auto transport = get_transport(name).transport;
    EXPECT_THAT(error_of([&] { transport->all_gather(at::full({2 + rank, 2}, 1.0))->finish(); }),
                HasSubstr("Mismatch"));
    const auto error = error_of([&] { comm::Group(name).all_gather(x).wait(); });
    EXPECT_THAT(error, AllOf(HasSubstr("cannot be used any more"), HasSubstr("Mismatch")));
    EXPECT_THAT(error_of([&] { get_transport(name); }), HasSubstr("cannot be used any more"));
  });
}

TEST(Transports, FailedCollectiveFailsTransport) {
  const ThreadRanks ranks(2, milliseconds(5000));
  ranks.run([&](int rank, const std::string& name) {
    const auto transport = get_transport(name).transport;
    gather_numbers(*transport, 1);
    error_of([&] { comm::Group(name).all_gather(at::full({2 + rank, 2}, 1.0)).wait(); });
    EXPECT_THAT(error_of([&] { transport->all_gather(at::full({1, 1}, 1.0)); }), HasSubstr("cannot be used any more"));
  });
}

TEST(Transports, DroppedCollectiveFailsGroup) {
  const ThreadRanks ranks(2, milliseconds(5000));
  ranks.run([&](int, const std::string& name) {
    const auto transport = get_transport(name).transport;
    transport->all_gather(at::full({1, 1}, 1.0));
    EXPECT_THAT(error_of([&] { comm::Group(name).all_gather(at::full({1}, 1.0)).wait(); }),
                HasSubstr("destroyed before it finished"));
  });
}

TEST(Transports, RejectsSecondThreadWhileCollectiveIsOpen) {
  const ThreadRanks ranks(2, milliseconds(5000));
  ranks.run([&](int rank, const std::string& name) {
    const auto transport = get_transport(name).transport;
    const auto other = [](const std::function<void()>& fn) {
      std::string error;
      std::thread([&] { error = error_of(fn); }).join();
      return error;
    };
    auto collective = transport->all_gather(at::full({1, 1}, 1.0));
    EXPECT_THAT(other([&] { transport->all_gather(at::full({1, 1}, 1.0)); }), HasSubstr("in use by another thread"));
    EXPECT_THAT(other([&] { collective->arrived(1 - rank); }), HasSubstr("in use by another thread"));
    collective->wait(1 - rank, 1);
    collective->finish();
    collective.reset();
    EXPECT_EQ(other([&] { gather_numbers(*transport, 1); }), "");  // allowed once no collective is open
  });
}

// ---- hosts and UCX --------------------------------------------------------------------------------------------------

TEST(Transports, UnknownHostIdentityMatchesNone) {
  auto a = comm::HostIdentity::local();
  EXPECT_EQ(comm::not_colocated_reason(a, a), "");
  for (auto field :
       {&comm::HostIdentity::boot_id, &comm::HostIdentity::pid_namespace, &comm::HostIdentity::net_namespace}) {
    auto b = a;
    b.*field = "unknown";
    EXPECT_NE(comm::not_colocated_reason(b, b), "");
  }
}

TEST(Transports, UcxIsNotUsedWhenNotTrusted) {
  const char* before = std::getenv("WEFT_UCX_TRUSTED");
  const std::string kept = before ? before : "";
  ::unsetenv("WEFT_UCX_TRUSTED");
  const auto no_ucx = comm::ucx_unavailable_reason();
  EXPECT_THAT(no_ucx, HasSubstr("WEFT_UCX_TRUSTED"));
  EXPECT_THAT(error_of([] { comm::make_ucx_transport({nullptr, 0, 1, "tp", milliseconds(100)}); }),
              HasSubstr("WEFT_UCX_TRUSTED"));
  const auto [kind, reason] =
      select_transport({peer_info("a", "", no_ucx.c_str()), peer_info("b", "", no_ucx.c_str())});
  EXPECT_EQ(kind, TransportKind::plain);
  EXPECT_THAT(reason, HasSubstr("WEFT_UCX_TRUSTED"));
  EXPECT_THAT(error_of([&] {
                select_transport({peer_info("a", "ucx", no_ucx.c_str()), peer_info("b", "ucx", no_ucx.c_str())});
              }),
              HasSubstr("WEFT_UCX_TRUSTED"));
  ::setenv("WEFT_UCX_TRUSTED", "yes", 1);
  EXPECT_THAT(error_of([] { comm::ucx_unavailable_reason(); }), HasSubstr("expected 0 or 1"));
  kept.empty() ? ::unsetenv("WEFT_UCX_TRUSTED") : ::setenv("WEFT_UCX_TRUSTED", kept.c_str(), 1);
}

TEST(Transports, UcxMissingOnOneRankIsUsedByNone) {
  const comm::PeerInfoTexts peer_infos{peer_info("a", "", ""), peer_info("b", "", "")};
  EXPECT_EQ(comm::select_loaded_transport(peer_infos, {"", ""}).first, TransportKind::ucx);
  const auto [kind, reason] = comm::select_loaded_transport(peer_infos, {"", "no libucp"});
  EXPECT_EQ(kind, TransportKind::plain);
  EXPECT_THAT(reason, HasSubstr("rank 1 cannot use UCX (no libucp)"));
}

}  // namespace
}  // namespace weft::testing
