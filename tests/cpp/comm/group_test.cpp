// Collectives of a group; ranks are threads.
#include "weft/comm/group.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/cpp/thread_ranks.h"

namespace weft::comm {
namespace {

using testing::ThreadRanks;

/// Sets an environment variable for one test.
struct ScopedEnv {
  const char* name;
  ScopedEnv(const char* variable, const char* value) : name(variable) { setenv(variable, value, 1); }
  ~ScopedEnv() { unsetenv(name); }
};

std::vector<at::Tensor> random_blocks(int ranks, at::IntArrayRef sizes, at::ScalarType dtype) {
  std::vector<at::Tensor> blocks;
  for (int r = 0; r < ranks; ++r) blocks.push_back(at::randn(sizes).to(dtype));
  return blocks;
}

/// Sum in rank order, rounded once.
at::Tensor sum(const std::vector<at::Tensor>& blocks) {
  const auto opmath_dtype = blocks[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto total = blocks[0].to(opmath_dtype);
  for (size_t r = 1; r < blocks.size(); ++r) total = total + blocks[r].to(opmath_dtype);
  return total.to(blocks[0].scalar_type());
}

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

TEST(Group, CollectivesAreExact) {
  for (const int p : {1, 2, 3, 4}) {
    const ThreadRanks ranks(p);
    for (const auto dtype : kDtypes) {
      for (const auto& sizes :
           {std::vector<int64_t>{2 * p, 5}, {p, 3, 2}, {0, 4}, {p}, {p, 0}, {2 * p, 4099}, {p, 1 << 12}}) {
        const auto x = random_blocks(p, sizes, dtype);
        ranks.run([&](int rank, const std::string& name) {
          const Group group(name);
          EXPECT_EQ(group.rank(), rank);
          EXPECT_EQ(group.size(), p);
          EXPECT_TRUE(at::equal(group.all_gather(x[rank]).wait(), at::cat(x)));
          EXPECT_TRUE(at::equal(group.reduce_scatter(x[rank]).wait(), sum(x).chunk(p)[sizes[0] ? rank : 0]));
          EXPECT_TRUE(at::equal(group.all_reduce(x[rank]).wait(), sum(x)));
        });
      }
    }
  }
}

TEST(Group, AllReduceKeepsInputForAnyElementCount) {
  const ThreadRanks ranks(3);
  for (const int64_t n : {1, 2, 3, 7, 5001}) {
    const auto x = random_blocks(3, {n}, at::kBFloat16);
    const auto before = at::stack(x);
    ranks.run([&](int rank, const std::string& name) {
      EXPECT_TRUE(at::equal(Group(name).all_reduce(x[rank]).wait(), sum(x)));
    });
    EXPECT_TRUE(at::equal(at::stack(x), before));
  }
}

TEST(Group, AcceptsStridedInput) {
  const ThreadRanks ranks(2);
  const auto x = random_blocks(2, {4, 6}, at::kFloat);
  ranks.run([&](int rank, const std::string& name) {
    const Group group(name);
    const auto transposed = x[rank].t();
    EXPECT_TRUE(at::equal(group.all_gather(transposed).wait(), at::cat({x[0].t(), x[1].t()})));
    EXPECT_TRUE(at::equal(group.all_reduce(transposed).wait(), sum(x).t()));
    EXPECT_TRUE(at::equal(group.reduce_scatter(transposed).wait(), sum(x).t().chunk(2)[rank]));
  });
}

TEST(Group, InFlightCollectivesMayOverlap) {
  const ThreadRanks ranks(4);
  const auto x = random_blocks(4, {8, 3000}, at::kFloat);  // too large to be sent with the fingerprint
  ranks.run([&](int rank, const std::string& name) {
    const Group group(name);
    auto gathered = group.all_gather(x[rank]);
    auto part = group.reduce_scatter(x[rank]);
    auto total = group.all_reduce(x[rank]);
    EXPECT_TRUE(at::equal(total.wait(), sum(x)));
    EXPECT_TRUE(at::equal(gathered.wait(), at::cat(x)));
    EXPECT_TRUE(at::equal(part.wait(), sum(x).chunk(4)[rank]));
  });
}

TEST(Group, DroppedWorkKeepsRanksInStep) {
  const ThreadRanks ranks(2);
  const auto x = random_blocks(2, {2, 3000}, at::kFloat);
  ranks.run([&](int rank, const std::string& name) {
    const Group group(name);
    {
      const auto dropped = group.all_reduce(x[rank]);
    }
    EXPECT_TRUE(at::equal(group.all_gather(x[rank]).wait(), at::cat(x)));
  });
}

/// The error of each rank r in `fn(group, r)`; "" if it raises none.
template <class Fn>
std::vector<std::string> errors(const ThreadRanks& ranks, Fn&& fn) {
  std::vector<std::string> texts(ranks.size());
  ranks.run([&](int rank, const std::string& name) {
    const Group group(name);
    try {
      fn(group, rank);
    } catch (const c10::DistError& error) {
      texts[rank] = error.what_without_backtrace();
    }
  });
  return texts;
}

TEST(Group, MismatchFailsEveryRankAndTheGroup) {
  const at::Tensor wide = at::empty({2, 4}), narrow = at::empty({2, 3}), other = at::empty({2, 4}, at::kBFloat16);
  const std::vector<std::function<void(const Group&)>> fns{
      [&](const Group& group) { group.all_gather(wide).wait(); },
      [&](const Group& group) { group.all_gather(narrow).wait(); },
      [&](const Group& group) { group.all_gather(other).wait(); },
      [&](const Group& group) { group.reduce_scatter(wide).wait(); },
      [&](const Group& group) { group.all_reduce(wide).wait(); },
  };
  for (size_t i = 1; i < fns.size(); ++i) {
    const ThreadRanks ranks(3);
    const auto fn = [&](const Group& group, int rank) { fns[rank == 1 ? i : 0](group); };
    const auto texts = errors(ranks, fn);
    EXPECT_NE(texts[0].find("rank 0: all_gather of [2, 4] float32"), std::string::npos) << texts[0];
    // The texts end with the group's name, which differs between threads.
    const auto same = [](const std::string& text) { return text.substr(0, text.find(" Group '")); };
    EXPECT_EQ(same(texts[1]), same(texts[0]));
    EXPECT_EQ(same(texts[2]), same(texts[0]));
    for (const auto& text : errors(ranks, [&](const Group& group, int) { group.all_gather(wide).wait(); }))
      EXPECT_NE(text.find("cannot be used any more"), std::string::npos) << text;
  }
}

TEST(Group, MissingRankTimesOutWithOperationName) {
  const ScopedEnv seconds("WEFT_TIMEOUT", "0.2");
  const ThreadRanks ranks(2);
  const auto begin = std::chrono::steady_clock::now();
  const auto texts = errors(ranks, [&](const Group& group, int rank) {
    if (rank == 0) group.reduce_scatter(at::empty({2, 2})).wait();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1200));
  EXPECT_NE(texts[0].find("Collective 0 (reduce_scatter of [2, 2] float32) failed on rank 0"), std::string::npos)
      << texts[0];
}

TEST(Group, WeftCheckFirstLimitsFingerprintChecks) {
  for (const bool always : {false, true}) {
    if (!always) ::setenv("WEFT_CHECK", "first", 1);
    const ThreadRanks ranks(2);
    const auto x = at::empty({2, 2});
    ranks.run([&](int, const std::string& name) {
      const Group group(name);
      for (int i = 0; i < 100; ++i) group.all_gather(x).wait();
    });
    // Same number of bytes, other dtype: only the fingerprint differs.
    const auto texts = errors(ranks, [&](const Group& group, int rank) {
      group.all_gather(rank == 0 ? x : at::empty({2, 2}, at::kInt)).wait();
    });
    for (const auto& text : texts) EXPECT_EQ(text.empty(), !always) << text;
    ::unsetenv("WEFT_CHECK");
  }
}

TEST(Group, RejectsInvalidSettings) {
  const ThreadRanks ranks(2);
  for (const auto& [name, value] :
       {std::pair{"WEFT_CHECK", "sometimes"}, {"WEFT_TIMEOUT", "0"}, {"WEFT_TIMEOUT", "x"}}) {
    const ScopedEnv setting(name, value);
    EXPECT_THROW(Group{ranks.name(0)}, c10::ValueError) << name;
  }
  EXPECT_THROW(Group{"nobody"}, c10::ValueError);
}

TEST(Group, ReduceScatterRejectsUnevenRows) {
  const ThreadRanks ranks(2);
  ranks.run([&](int, const std::string& name) {
    EXPECT_THROW(Group(name).reduce_scatter(at::empty({3, 2})), c10::ValueError);
    Group(name).all_gather(at::empty({3, 2})).wait();  // the group still works
  });
}

TEST(Group, ReusedGroupNameStartsFresh) {
  const ScopedEnv seconds("WEFT_TIMEOUT", "0.1");
  const ThreadRanks first(2);
  errors(first, [&](const Group& group, int rank) { group.all_gather(at::empty({2 + rank})).wait(); });
  c10d::unregister_process_group(first.name(0));
  const ThreadRanks second(2);
  c10d::register_process_group(first.name(0), c10d::resolve_process_group(second.name(0)));
  second.run([&](int rank, const std::string& name) {
    Group(rank == 0 ? first.name(0) : name).all_gather(at::empty({2})).wait();
  });
}

}  // namespace
}  // namespace weft::comm
