#pragma once
#include <cstddef>

namespace weft::kernels {

constexpr size_t kHugePageSize = 2 << 20;

/// Asks the system to back memory with huge pages, as far as it covers whole ones. The first touch of 2 MB is then one
/// fault instead of 512, and rows that lie far apart share entries of the TLB. The advice stays with the addresses
/// until they are unmapped: give it for a mapping, not for memory that an allocator will hand to somebody else.
void advise_huge_pages(void* memory, size_t bytes);

/// Memory in a mapping of its own, all zeros, aligned to a huge page and backed by huge pages if the system grants
/// them. Raises if there is none.
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
