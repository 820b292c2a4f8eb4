#include "weft/kernels/huge_pages.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstdint>

namespace weft::kernels {
namespace {

/// Bytes from `memory` to the next huge page boundary.
size_t bytes_to_huge_page(const void* memory) { return -reinterpret_cast<uintptr_t>(memory) % kHugePageSize; }

size_t round_up_to_pages(size_t bytes) {
  constexpr size_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

void advise_huge_pages(void* memory, size_t bytes) {
  const size_t before = bytes_to_huge_page(memory);
  if (bytes < before + kHugePageSize) return;
  const size_t length = (bytes - before) / kHugePageSize * kHugePageSize;
  madvise(static_cast<char*>(memory) + before, length, MADV_HUGEPAGE);  // a hint: failure is harmless
}

HugePageBuffer::HugePageBuffer(size_t bytes) : size_(round_up_to_pages(bytes)) {
  if (size_ == 0) return;
  const size_t mapped = size_ + kHugePageSize;  // enough for an aligned range; the rest is unmapped below
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "weft: could not map a buffer of ", bytes, " bytes: out of memory.");
  const size_t before = bytes_to_huge_page(memory), behind = mapped - before - size_;
  data_ = static_cast<char*>(memory) + before;
  if (before > 0) munmap(memory, before);
  if (behind > 0) munmap(data_ + size_, behind);
  advise_huge_pages(data_, size_);
}

HugePageBuffer::~HugePageBuffer() {
  if (data_) munmap(data_, size_);
}

}  // namespace weft::kernels
