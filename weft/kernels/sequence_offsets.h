#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

// Included by kernels only: the offsets are read while a kernel runs and nowhere else.

namespace weft::kernels {

/// Row offsets of packed sequences: sequence i has rows [begin(i), end(i)). The constructor reads `cu_seqlens`, int32
/// or int64 with one element more than there are sequences, and raises ValueError unless it starts at 0, does not
/// decrease and ends at `rows`. `name` is that of the tensor, for errors.
class SequenceOffsets {
 public:
  SequenceOffsets(const at::Tensor& cu_seqlens, int64_t rows, const char* name = "cu_seqlens");

  int64_t sequences() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t begin(int64_t i) const { return offsets_[i]; }
  int64_t end(int64_t i) const { return offsets_[i + 1]; }
  int64_t rows(int64_t i) const { return end(i) - begin(i); }
  /// Rows of the longest sequence; 0 if there are none.
  int64_t longest() const;

 private:
  c10::SmallVector<int64_t, 65> offsets_;
};

}  // namespace weft::kernels
