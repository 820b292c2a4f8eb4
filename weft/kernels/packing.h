#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace weft::kernels {

// The AMX tier multiplies by weights in an order of its own and packs them into it in each call. Of frozen weights it
// keeps the packed copies between calls, at most `packing_limit()` bytes of them.

/// Freezes `weight`: the caller guarantees that its values do not change until `unfreeze`; other tensors in its storage
/// may change. After a change freeze again: this drops copies of the old values. Until then a change that the version
/// counter records makes the next GEMM raise, which names the weight; any other change (fused optimizers, `.data`,
/// numpy, memory shared with another process) goes unnoticed, and results are those of the old values.
void freeze(const at::Tensor& weight, std::string name = "weight");
void unfreeze(const at::Tensor& weight);

/// Bytes of packed copies alive now.
int64_t packed_bytes();
/// Most bytes to keep; a frozen weight that does not fit is packed in each call. 0 keeps none. Starts as the
/// environment variable WEFT_PACKED_BYTES, else 1 GiB.
int64_t packing_limit();
void set_packing_limit(int64_t bytes);

/// How often since the start of the process a copy was made and kept, and a kept one used again.
struct PackingCounts {
  int64_t packed = 0, reused = 0;
};
PackingCounts packing_counts();

}  // namespace weft::kernels
