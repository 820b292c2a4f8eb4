#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "weft/kernels/tier.h"

namespace weft::kernels {

/// Which rows belong to which group: group g has splits[g] rows, one group behind the other; rows behind the last group
/// belong to none. Outside of kernels it is opaque: how many groups there are is known, how many rows each has is not.
class GroupIndex {
 public:
  /// `splits`: int32 or int64, one value for each group.
  explicit GroupIndex(const at::Tensor& splits) : splits_(splits) {}
  int64_t groups() const { return splits_.numel(); }

 private:
  friend class GroupOffsets;  // kernels/group_offsets.h
  at::Tensor splits_;
};

/// One matrix [rows, columns] for each group, all of one dtype and without gaps: the slices of a tensor
/// [G, rows, columns], or G tensors.
class GroupedMatrix {
 public:
  GroupedMatrix() = default;
  /// [G, rows, columns], contiguous.
  explicit GroupedMatrix(const at::Tensor& stacked);
  /// One tensor of rows·columns values for each group, contiguous; all have one dtype.
  GroupedMatrix(c10::ArrayRef<at::Tensor> list, int64_t rows, int64_t columns);

  bool defined() const { return groups_ > 0; }
  int64_t groups() const { return groups_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  at::ScalarType dtype() const { return first().scalar_type(); }
  const at::Tensor& first() const { return list_.front(); }
  /// One stacked tensor, or one for each group.
  c10::ArrayRef<at::Tensor> tensors() const { return list_; }
  /// The matrix of group g as memory, and as a tensor.
  void* data(int64_t g) const;
  at::Tensor matrix(int64_t g) const;

 private:
  c10::SmallVector<at::Tensor, 1> list_;
  int64_t groups_ = 0, rows_ = 0, columns_ = 0;
};

/// How groups are multiplied: by the grouped kernel of the tier, or one after the other by `gemm`, which is the truth
/// for tests.
enum class GroupedPath { best, split };

struct GroupedEpilogue {
  GroupedMatrix bias = {};  // [1, N] for each group
  at::Tensor scales = {};   // one value for each row, of any dtype: the bias is added scales[r] times
  at::Tensor out = {};  // [T, N], contiguous: rows of no group keep their contents; undefined: fresh, and they are 0
  GroupedPath path = GroupedPath::best;
};

// All of these read the splits inside a launch (kernels/launch.h) and raise ValueError there if a split is negative or
// their sum is larger than the number of rows. They allocate by the sizes of their arguments alone, and do nothing on
// the meta device but that.

/// Y_r = X_r W_gᵀ (`transposed`) or X_r W_g, plus s_r·b_g, for the rows r of group g. X [T, K] with rows without gaps.
/// Sums in float32 (float64 for float64), rounded once.
at::Tensor grouped_gemm(const GroupIndex& index, const at::Tensor& x, const GroupedMatrix& w, bool transposed,
                        const GroupedEpilogue& epilogue = {});

/// out_g = Σ_{r∈g} dY_rᵀ X_r, or with `accumulate` out_g += …; out_g [N, K] of any dtype. Without rows: 0, or nothing
/// is written.
void grouped_weight_gradient(const GroupIndex& index, const at::Tensor& dy, const at::Tensor& x,
                             const GroupedMatrix& out, bool accumulate, GroupedPath path = GroupedPath::best);

struct GroupedBiasGradient {
  at::Tensor db;  // [G, N], in the dtype of dy
  at::Tensor ds;  // [T], float32 (float64 for float64); 0 where a row belongs to no group
};
/// db_g = Σ_{r∈g} s_r·dY_r and ds_r = Σ_j dY_rj·b_gj, each undefined unless wanted; s_r = 1 without `scales`. Added up
/// in an order that depends on the sizes alone.
GroupedBiasGradient grouped_bias_gradient(const GroupIndex& index, const at::Tensor& dy, const at::Tensor& scales,
                                          const GroupedMatrix& bias, bool needs_db, bool needs_ds);

/// Which tier multiplies groups of matrices of `dtype` on `device`, K long, N wide.
TierChoice choose_grouped_tier(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k);

}  // namespace weft::kernels
