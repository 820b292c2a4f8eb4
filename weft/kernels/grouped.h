#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "weft/kernels/quantize.h"

namespace weft::kernels {

/// Assigns rows to groups: group g has the next splits[g] rows; rows after the last group belong to none. Opaque
/// outside kernels, which alone may read the splits: callers know the number of groups but not their sizes.
class GroupIndex {
 public:
  /// `splits`: int32 or int64, one element per group.
  explicit GroupIndex(const at::Tensor& splits) : splits_(splits) {}
  int64_t groups() const { return splits_.numel(); }

 private:
  friend class GroupOffsets;  // kernels/group_offsets.h
  at::Tensor splits_;
};

/// One contiguous matrix [rows, columns] per group, all of the same dtype: the slices of a tensor [G, rows, columns],
/// or G tensors.
class GroupedMatrix {
 public:
  GroupedMatrix() = default;
  /// [G, rows, columns], contiguous.
  explicit GroupedMatrix(const at::Tensor& stacked);
  /// One contiguous tensor of rows·columns elements per group, all of the same dtype.
  GroupedMatrix(c10::ArrayRef<at::Tensor> list, int64_t rows, int64_t columns);

  bool defined() const { return groups_ > 0; }
  int64_t groups() const { return groups_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  at::ScalarType dtype() const { return first().scalar_type(); }
  const at::Tensor& first() const { return list_.front(); }
  /// The stacked tensor, or one tensor per group.
  c10::ArrayRef<at::Tensor> tensors() const { return list_; }
  /// The matrix of group g, as a pointer and as a tensor.
  void* data(int64_t g) const;
  at::Tensor matrix(int64_t g) const;

 private:
  c10::SmallVector<at::Tensor, 1> list_;
  int64_t groups_ = 0, rows_ = 0, columns_ = 0;
};

/// best: the tier's grouped kernel; split: one `gemm` per group, the reference for tests.
enum class GroupedPath { best, split };

/// How the operands of a grouped GEMM are quantized: each group by itself, A as x or dy, B as w or x. If A is not, it
/// is multiplied by the values of B's rowwise copy.
struct GroupedQuantization {
  std::optional<Quantization> a;
  Quantization b;
  at::Tensor seed = {};          // int64, of A: group g has offset g
  bool checks_hadamard = false;  // raises if the columnwise copy of A could not be transformed
};

struct GroupedEpilogue {
  GroupedMatrix bias = {};  // [1, N] per group
  at::Tensor scales = {};   // [T], any dtype: row r gets scales[r] times the bias
  at::Tensor out = {};      // [T, N], contiguous; ungrouped rows are left as they are. Undefined: allocated, they are 0
  GroupedPath path = GroupedPath::best;
  std::optional<GroupedQuantization> quantization = {};
};

// These functions allocate from the sizes of their arguments alone; on the meta device they do nothing else. They read
// the splits inside a launch (kernels/launch.h) and raise ValueError there if a split is negative or the splits sum to
// more rows than the input has.

/// Y_r = X_r W_gᵀ (`transposed`) or X_r W_g, plus s_r·b_g, for the rows r of group g. X [T, K] with contiguous rows.
/// Accumulates in float32 (float64 for float64) and rounds once.
at::Tensor grouped_gemm(const GroupIndex& index, const at::Tensor& x, const GroupedMatrix& w, bool transposed,
                        const GroupedEpilogue& epilogue = {});

/// out_g = Σ_{r∈g} dY_rᵀ X_r, or out_g += … with `accumulate`; out_g [N, K] of any dtype. An empty group writes 0, or
/// nothing with `accumulate`.
void grouped_weight_gradient(const GroupIndex& index, const at::Tensor& dy, const at::Tensor& x,
                             const GroupedMatrix& out, bool accumulate, GroupedPath path = GroupedPath::best,
                             const std::optional<GroupedQuantization>& quantization = {});

struct GroupedBiasGradient {
  at::Tensor db;  // [G, N], in the dtype of dy
  at::Tensor ds;  // [T], float32 (float64 for float64); 0 where a row belongs to no group
};
/// db_g = Σ_{r∈g} s_r·dY_r and ds_r = Σ_j dY_rj·b_gj, each undefined unless needed; s_r = 1 without `scales`. The order
/// of summation depends on the sizes alone.
GroupedBiasGradient grouped_bias_gradient(const GroupIndex& index, const at::Tensor& dy, const at::Tensor& scales,
                                          const GroupedMatrix& bias, bool needs_db, bool needs_ds);

/// The tier of a grouped GEMM with weights of N·K elements of `dtype` on `device`.
TierChoice choose_grouped_tier(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k);

}  // namespace weft::kernels
