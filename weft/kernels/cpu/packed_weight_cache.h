#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "weft/kernels/huge_pages.h"

namespace weft::kernels {

/// Memory for a matrix in the kernel's own order.
class PackedCopy {
 public:
  explicit PackedCopy(int64_t bytes) : memory_(static_cast<size_t>(bytes)), bytes_(bytes) {}

  uint16_t* data() const { return reinterpret_cast<uint16_t*>(memory_.data()); }
  int64_t bytes() const { return bytes_; }

 private:
  HugePageBuffer memory_;
  int64_t bytes_;
};

/// How to make a packed copy.
struct PackRequest {
  at::Tensor source;  // a matrix; its memory is what the copy stands for
  int64_t half = 0;   // gated order
  int64_t bytes = 0;
  std::function<void(uint16_t*)> pack;
};

/// The packed copy of a frozen weight, made at its first use; whoever uses it holds it. Null if `request.source` is not
/// the memory of a frozen weight, or there is no room for the copy. Raises if the weight's version counter moved and
/// its values are no longer those of the copy. Any number of threads may call.
std::shared_ptr<const PackedCopy> packed_frozen_weight(const PackRequest& request);

/// Memory for at least `bytes` bytes that belongs to the caller alone until the last reference to it is gone. The last
/// two pieces up to 64 MB are kept for the next caller, since fresh pages cost as much as packing.
std::shared_ptr<PackedCopy> acquire_buffer(int64_t bytes);

}  // namespace weft::kernels
