#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace weft::kernels {

using Checksum = std::array<uint64_t, 2>;

/// A weight in the kernel's own order. Immutable; a product that uses it holds it.
class PackedCopy {
 public:
  explicit PackedCopy(int64_t bytes);
  ~PackedCopy();
  PackedCopy(const PackedCopy&) = delete;
  PackedCopy& operator=(const PackedCopy&) = delete;

  uint16_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint16_t* data_;
  int64_t bytes_;
};

/// How to make a packed copy, and a checksum over every value it is made from.
struct Packing {
  at::Tensor source;  // a matrix; its memory is what the copy stands for
  int64_t half = 0;   // gated order
  int64_t bytes = 0;
  std::function<Checksum()> checksum;
  std::function<void(uint16_t*)> pack;
};

/// The packed form of a weight. If `promised` is set nobody has looked yet whether the weight is still the one it was
/// made from: the user of the copy computes the checksum on the way, compares, and says what it found by `compared`.
struct KeptCopy {
  std::shared_ptr<const PackedCopy> copy = nullptr;  // null: none is to be kept
  std::optional<Checksum> promised = {};
};

/// A kept copy if the weight's values are still those it was made from (checksum), or if the weight is frozen; else
/// packed anew. `may_wait`: the checksum may be left to the user, which is done for weights that have not changed for a
/// while. Null if a copy is not to be kept: the weight's first use, no room for it, or memory that comes and goes. Any
/// number of threads may call.
KeptCopy kept_copy(const Packing& packing, bool may_wait);
void compared(const Packing& packing, bool same);

}  // namespace weft::kernels
