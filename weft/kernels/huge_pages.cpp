#include "weft/kernels/huge_pages.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstdint>

namespace weft::kernels {
namespace {

/// Bytes from `memory` up to the next huge page.
size_t to_huge_page(const void* memory) { return -reinterpret_cast<uintptr_t>(memory) % kHugePage; }

size_t whole_pages(size_t bytes) {
  constexpr size_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

void ask_for_huge_pages(void* memory, size_t bytes) {
  const size_t before = to_huge_page(memory);
  if (bytes < before + kHugePage) return;
  const size_t whole = (bytes - before) / kHugePage * kHugePage;
  madvise(static_cast<char*>(memory) + before, whole, MADV_HUGEPAGE);  // the system may decline
}

HugeMemory::HugeMemory(size_t bytes) : size_(whole_pages(bytes)) {
  if (size_ == 0) return;
  const size_t mapped = size_ + kHugePage;  // so much that an aligned part fits; the rest is unmapped again
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "weft: no memory for a buffer of ", bytes, " bytes.");
  const size_t before = to_huge_page(memory), behind = mapped - before - size_;
  data_ = static_cast<char*>(memory) + before;
  if (before > 0) munmap(memory, before);
  if (behind > 0) munmap(data_ + size_, behind);
  ask_for_huge_pages(data_, size_);
}

HugeMemory::~HugeMemory() {
  if (data_) munmap(data_, size_);
}

}  // namespace weft::kernels
