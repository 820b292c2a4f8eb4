// A test may be skipped for a reason of this list; any other skip is a failure.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>

namespace {

struct AllowedSkip {
  std::string_view suite, reason;  // parts of its name and of its message
};

constexpr AllowedSkip kAllowed[] = {
    {"KernelsActivation", "ATen's sums do"},                        // depend on the number of threads
    {"KernelsGemm", "no vector tier"},                              // tests the vector tiers themselves
    {"KernelsPieces", "only tiles make squares"},                   // bfloat16 on the amx tier
    {"KernelsPieces", "only tiles take packed rows"},               // the same
    {"KernelsPieces", "weights are packed by the amx tier only"},   // the same
    {"KernelsPacking", "weights are packed by the amx tier only"},  // the same
    {"EveryRule", "needs ranks"},                                   // tests/dist/test_overlap.py runs these rules
    {"Schedules", "one rank agrees with itself"},                   // nothing to disagree about
#ifndef WEFT_TESTS_WITH_UCX
    {"UcxLink", ""},
#endif
};

class SkipsAreAllowed final : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo& test) override {
    if (!test.result()->Skipped()) return;
    for (int i = 0; i < test.result()->total_part_count(); ++i) {
      const auto& part = test.result()->GetTestPartResult(i);
      if (part.skipped() && !allowed(test.test_suite_name(), part.message()))
        ADD_FAILURE() << "a skip that tests/cpp/allowed_skips.cpp does not list: " << part.message();
    }
  }
  static bool allowed(std::string_view suite, std::string_view message) {
    return std::any_of(std::begin(kAllowed), std::end(kAllowed), [&](const AllowedSkip& skip) {
      return suite.find(skip.suite) != suite.npos && message.find(skip.reason) != message.npos;
    });
  }
};

const bool appended = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new SkipsAreAllowed);  // owned by GoogleTest
  return true;
}();

}  // namespace
