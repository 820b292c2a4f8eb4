#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "weft/kernels/huge_pages.h"

namespace weft::kernels {

/// Memory of a packed matrix.
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
  at::Tensor source;  // the matrix; its memory identifies the weight
  int64_t half = 0;   // as Operand::half
  int64_t bytes = 0;
  std::function<void(uint16_t*)> pack;
};

/// The packed copy of a frozen weight, made at its first use. Null if `request.source` is not the memory of a frozen
/// weight, or if the copy would exceed the limit. Throws if the weight's version counter moved and its values differ
/// from the copy. Thread-safe.
std::shared_ptr<const PackedCopy> packed_frozen_weight(const PackRequest& request);

/// A buffer of at least `bytes` bytes, exclusive to the caller until the last reference is released. Up to two released
/// buffers of at most 64 MB are pooled, because page faults of a new buffer cost as much as packing. Thread-safe.
std::shared_ptr<PackedCopy> acquire_buffer(int64_t bytes);

}  // namespace weft::kernels
