#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace weft::kernels {

// The AMX tier multiplies by weights in an order of its own. Copies in that order are kept from a weight's second use
// on, at most `packing_limit()` bytes of them, and never trusted: each use compares a 128-bit checksum of the whole
// weight, since neither version counters nor addresses tell that values changed. The checksum is left out for a frozen
// weight only. No copy is kept of a weight whose memory comes and goes, as FSDP's does.

/// Promises that the values of `weight` stay as they are until `thaw`; other tensors in its storage may change. After a
/// change promise again: copies from before are dropped.
void freeze(const at::Tensor& weight);
void thaw(const at::Tensor& weight);

/// Bytes of packed copies alive now.
int64_t packed_bytes();
/// Most bytes to keep; copies that were used less recently make way for a weight, others do not. 0 keeps none. Starts
/// as the environment variable WEFT_PACKED_BYTES, else 1 GiB.
int64_t packing_limit();
void set_packing_limit(int64_t bytes);

/// How often since the start of the process a copy was made, found to hold, found changed (and made again), and used
/// without looking.
struct PackingCounts {
  int64_t packed = 0, verified = 0, stale = 0, frozen = 0;
};
PackingCounts packing_counts();

}  // namespace weft::kernels
