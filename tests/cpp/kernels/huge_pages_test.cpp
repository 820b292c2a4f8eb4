// Huge pages are a hint: it changes no value, whatever part of the memory it is given for.
#include "weft/kernels/huge_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "weft/kernels/operand.h"

namespace weft::kernels {
namespace {

TEST(KernelsHugePages, LeaveMemoryThatIsInUseAsItIs) {
  std::vector<char> memory(4 * kHugePage + 123, 'w');
  for (const size_t from : {size_t{0}, size_t{1}, size_t{4096}, kHugePage - 1})
    for (const size_t bytes : {size_t{0}, size_t{1}, kHugePage - 1, kHugePage, 3 * kHugePage + 17}) {
      ask_for_huge_pages(memory.data() + from, bytes);
      EXPECT_EQ(std::count(memory.begin(), memory.end(), 'w'), memory.size());
    }
}

TEST(KernelsHugePages, LargeFreshMemoryCanBeWrittenFromEndToEnd) {
  const auto t = fresh({40 << 20}, at::kChar);
  auto* bytes = t.mutable_data_ptr<int8_t>();
  std::fill_n(bytes, t.numel(), int8_t{7});
  EXPECT_EQ(std::count(bytes, bytes + t.numel(), int8_t{7}), t.numel());
}

}  // namespace
}  // namespace weft::kernels
