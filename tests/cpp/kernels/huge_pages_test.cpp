// Huge page advice is a hint: it changes no contents, for any range of memory.
#include "weft/kernels/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "weft/kernels/cpu_tensors.h"

namespace weft::kernels {
namespace {

TEST(KernelsHugePages, AdvicePreservesContents) {
  std::vector<char> memory(4 * kHugePageSize + 123, 'w');
  for (const size_t from : {size_t{0}, size_t{1}, size_t{4096}, kHugePageSize - 1})
    for (const size_t bytes : {size_t{0}, size_t{1}, kHugePageSize - 1, kHugePageSize, 3 * kHugePageSize + 17}) {
      advise_huge_pages(memory.data() + from, bytes);
      EXPECT_EQ(std::count(memory.begin(), memory.end(), 'w'), memory.size());
    }
}

TEST(KernelsHugePages, LargeTensorIsWritable) {
  const auto t = empty_cpu({40 << 20}, at::kChar);
  auto* bytes = t.mutable_data_ptr<int8_t>();
  std::fill_n(bytes, t.numel(), int8_t{7});
  EXPECT_EQ(std::count(bytes, bytes + t.numel(), int8_t{7}), t.numel());
}

TEST(KernelsHugePages, BufferIsAlignedZeroedAndUnmapped) {
  for (const size_t bytes : {size_t{1}, size_t{4096}, kHugePageSize - 1, kHugePageSize, 3 * kHugePageSize + 17}) {
    void* where = nullptr;
    {
      const HugePageBuffer memory(bytes);
      where = memory.data();
      EXPECT_EQ(reinterpret_cast<uintptr_t>(where) % kHugePageSize, 0U);
      EXPECT_GE(memory.size(), bytes);
      EXPECT_EQ(std::count(memory.data(), memory.data() + memory.size(), '\0'), memory.size());
      std::fill_n(memory.data(), memory.size(), 'w');
    }
    unsigned char resident = 0;
    EXPECT_EQ(mincore(where, 4096, &resident), -1) << "still mapped";
  }
  EXPECT_EQ(HugePageBuffer(0).data(), nullptr);
}

}  // namespace
}  // namespace weft::kernels
