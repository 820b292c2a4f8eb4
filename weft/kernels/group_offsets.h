#pragma once
#include <c10/util/SmallVector.h>

#include "weft/kernels/grouped.h"

// Included by kernels only: the splits are read while a kernel runs and nowhere else.

namespace weft::kernels {

/// Row offsets of the groups. The constructor reads the splits and checks them against the number of rows.
class GroupOffsets {
 public:
  GroupOffsets(const GroupIndex& index, int64_t rows);

  int64_t groups() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t begin(int64_t g) const { return offsets_[g]; }
  int64_t end(int64_t g) const { return offsets_[g + 1]; }
  int64_t rows(int64_t g) const { return end(g) - begin(g); }
  /// Rows of all groups; the rows after them belong to none.
  int64_t total_rows() const { return offsets_.back(); }

 private:
  c10::SmallVector<int64_t, 65> offsets_;
};

}  // namespace weft::kernels
