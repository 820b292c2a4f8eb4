#pragma once
#include <cstddef>

namespace weft::kernels {

constexpr size_t kHugePage = 2 << 20;

/// Asks the system to back memory with huge pages, as far as it covers whole ones. The first touch of 2 MB is then one
/// fault instead of 512, and rows that lie far apart share entries of the CPU's address cache.
void ask_for_huge_pages(void* memory, size_t bytes);

}  // namespace weft::kernels
