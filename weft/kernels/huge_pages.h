#pragma once
#include <cstddef>

namespace weft::kernels {

constexpr size_t kHugePageSize = 2 << 20;

/// Asks Linux to use huge pages where `memory` covers them fully: the first touch of 2 MB is then one page fault
/// instead of 512, and distant rows share TLB entries. The advice holds until the addresses are unmapped, so use it for
/// mappings, not for memory that the allocator may reuse.
void advise_huge_pages(void* memory, size_t bytes);

/// A private, zeroed mapping, aligned to a huge page and backed by huge pages if Linux grants them. Throws if the
/// mapping fails.
class HugePageBuffer {
 public:
  explicit HugePageBuffer(size_t bytes);
  ~HugePageBuffer();
  HugePageBuffer(const HugePageBuffer&) = delete;
  HugePageBuffer& operator=(const HugePageBuffer&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  size_t size_;
};

}  // namespace weft::kernels
