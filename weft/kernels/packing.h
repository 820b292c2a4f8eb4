#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace weft::kernels {

// The AMX tier multiplies by weights in an order of its own. Copies in that order are kept between calls, at most
// `packing_limit()` bytes of them, and never trusted: each use compares a 128-bit checksum of the whole weight, since
// neither version counters nor addresses tell that values changed. The checksum is left out for a frozen weight only.
// No copy is kept of a weight whose memory comes and goes, as FSDP's does.

/// Promises that the values of `weight` stay as they are until `thaw`.
void freeze(const at::Tensor& weight);
void thaw(const at::Tensor& weight);

/// Bytes of packed copies alive now.
int64_t packed_bytes();
/// Most bytes to keep; the least recently used copies go first. 0 keeps none. Starts as the environment variable
/// WEFT_PACKED_BYTES, else 1 GiB.
int64_t packing_limit();
void set_packing_limit(int64_t bytes);

/// Counts since the start of the process.
struct PackingCounts {
  int64_t packed = 0, verified = 0, stale = 0, frozen = 0;
};
PackingCounts packing_counts();

}  // namespace weft::kernels
