#include "weft/kernels/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace weft::kernels {

void ask_for_huge_pages(void* memory, size_t bytes) {
  const auto from = reinterpret_cast<uintptr_t>(memory);
  const auto begin = (from + kHugePage - 1) / kHugePage * kHugePage, end = (from + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // the system may decline
}

}  // namespace weft::kernels
