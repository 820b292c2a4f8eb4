#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace weft::kernels {

// The AMX tier packs each weight into tile order before it multiplies. Packed copies of frozen weights are cached
// across calls, up to `packing_limit()` bytes in total. Every tier holds the caller to the guarantee.

/// Freezes `weight`: the caller guarantees that its values do not change until `unfreeze`. Other tensors in its storage
/// may change. After changing the weight, freeze it again to drop the copies of its old values. Otherwise the next call
/// raises an error that names the weight if the version counter recorded the change. Any other change (fused
/// optimizers, `.data`, numpy, memory shared with another process) goes unnoticed, and GEMMs that have packed copies
/// use the old values.
void freeze(const at::Tensor& weight, std::string name = "weight");
void unfreeze(const at::Tensor& weight);

/// Whether any weight is frozen.
bool any_frozen();
/// Raises if `weight` is frozen and its values have changed since the first call of this function for it. Reads the
/// values only if the version counter moved.
void check_frozen(const at::Tensor& weight);

/// Bytes of the packed copies that are cached now.
int64_t packed_bytes();
/// The limit of `packed_bytes()`. A frozen weight that does not fit is packed in each call; 0 caches none. The default
/// is the environment variable WEFT_PACKED_BYTES, or 1 GiB.
int64_t packing_limit();
void set_packing_limit(int64_t bytes);

/// Since the start of the process: copies that were cached, and uses of a cached copy.
struct PackingCounts {
  int64_t packed = 0, reused = 0;
};
PackingCounts packing_counts();

}  // namespace weft::kernels
