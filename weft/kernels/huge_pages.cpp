#include "weft/kernels/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace weft::kernels {

void ask_for_huge_pages(void* memory, size_t bytes) {
  const size_t before = -reinterpret_cast<uintptr_t>(memory) % kHugePage;  // up to the first whole one
  if (bytes < before + kHugePage) return;
  const size_t whole = (bytes - before) / kHugePage * kHugePage;
  madvise(static_cast<char*>(memory) + before, whole, MADV_HUGEPAGE);  // the system may decline
}

}  // namespace weft::kernels
