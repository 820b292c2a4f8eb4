#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>

#include "weft/kernels/activation.h"
#include "weft/kernels/tier.h"

// The loops that exist once per instruction set, on bare memory. Rows are contiguous; dtypes are float32, bfloat16 and
// float16; a pointer that is not needed is null. Each call takes the rows from `begin` to `end`, so that threads can
// share the work.

namespace weft::kernels {

/// A row of x is `blocks` times `columns` values, for a gated kind `blocks` times `columns` of a, then `columns` of b.
struct ActCall {
  Act act = {};
  int64_t blocks = 1, columns = 0;
  at::ScalarType dtype = at::kFloat;  // of x and out
  const void* x = nullptr;
  void* out = nullptr;  // act(x) or dx
  at::ScalarType dy_dtype = at::kFloat;
  const void* dy = nullptr;
  const float* scales = nullptr;  // a factor for each row: of act(x), or of dy
  float* ds = nullptr;            // Σ_columns dy·act(x), for each row
  float* column_sums = nullptr;   // Σ_rows dx is added, for each column of x
};
struct ActLoops {
  void (*forward)(const ActCall& call, int64_t begin, int64_t end);
  void (*backward)(const ActCall& call, int64_t begin, int64_t end);
};

/// One row is `columns` values. With `centered` a layer norm, else the mean is 0: an RMS norm, or without gamma and
/// with divisor 1 an L2 norm.
struct NormCall {
  int64_t columns = 0;
  double divisor = 1, eps = 0;  // rstd = 1/√(Σ(x - mean)²/divisor + eps)
  bool centered = false;
  at::ScalarType dtype = at::kFloat;  // of x and out
  const void* x = nullptr;
  void* out = nullptr;  // y or dx; dx may lie where dy does
  const float *gamma = nullptr, *beta = nullptr;
  float *mean = nullptr, *rstd = nullptr;  // written by forward if there, read by backward
  at::ScalarType dy_dtype = at::kFloat, addend_dtype = at::kFloat;
  const void *dy = nullptr, *addend = nullptr;  // dx = … + addend
  float *dgamma = nullptr, *dbeta = nullptr;    // sums over rows are added
};
struct NormLoops {
  void (*forward)(const NormCall& call, int64_t begin, int64_t end);
  void (*backward)(const NormCall& call, int64_t begin, int64_t end);
};

/// out = x·mask·scale + addend, for values `begin` to `end`.
struct MaskCall {
  at::ScalarType dtype = at::kFloat, addend_dtype = at::kFloat;
  const void *x = nullptr, *addend = nullptr;
  const bool* mask = nullptr;
  void* out = nullptr;
  float scale = 1;
};
/// Rows of values at data, ld values apart.
struct RowMajorView {
  void* data = nullptr;
  int64_t ld = 0;
  at::ScalarType dtype = at::kFloat;

  explicit operator bool() const { return data != nullptr; }
};

/// out = Σ terms; `out` may be one of them.
struct SumCall {
  int64_t columns = 0;
  c10::SmallVector<RowMajorView, 8> terms = {};
  RowMajorView out = {};
};
struct RowLoops {
  /// sums[j] += Σ x[i, j] over rows `begin` to `end`.
  void (*add_rows)(at::ScalarType dtype, const void* x, int64_t columns, float* sums, int64_t begin, int64_t end);
  /// out[i] = values[i] in another dtype.
  void (*round)(at::ScalarType dtype, const float* values, void* out, int64_t count);
  void (*scaled_mask_add)(const MaskCall& call, int64_t begin, int64_t end);
  void (*sum_terms)(const SumCall& call, int64_t begin, int64_t end);
};

/// What an `Epilogue` (kernels/gemm.h) asks for a block of rows of the product; `product` may lie where `pre_act` or
/// `out` is to be written.
struct EpilogueCall {
  int64_t columns = 0;  // of the product
  RowMajorView product;
  float scale = 1;
  RowMajorView bias;  // one row
  RowMajorView pre_act;
  std::optional<Act> act = {}, act_grad = {};
  RowMajorView act_input, act_output;
  float* column_sums = nullptr;  // Σ_rows is added
  RowMajorView addend, out;
};

/// A matrix of any strides.
struct StridedMatrix {
  const void* data;
  int64_t rows, columns, row_stride, column_stride;
};

struct EpilogueLoops {
  void (*apply)(const EpilogueCall& call, int64_t begin, int64_t end);
  /// p = A B for few values: p is float32 [A.rows, B.columns], `scratch` as large as B.
  void (*small_gemm)(at::ScalarType dtype, const StridedMatrix& a, const StridedMatrix& b, float* scratch,
                     const RowMajorView& p);
};

/// Some rows of a group (kernels/grouped.h): a bias, one row, and a factor for each row, `scales.ld` values apart.
struct GroupRows {
  int64_t rows = 0, columns = 0;
  RowMajorView x, bias, scales;
};
/// Where the product of a group goes: out_ij = p_ij + s_i·b_j, or with `accumulate` out_ij += …
struct GroupOutput {
  RowMajorView out, bias, scales;
  bool accumulate = false;
};
struct GroupLoops {
  /// A B for few values; `scratch` is as large as B.
  void (*gemm)(at::ScalarType dtype, const StridedMatrix& a, const StridedMatrix& b, float* scratch,
               const GroupOutput& to);
  /// out_j = Σ_i s_i·x_ij, for columns `begin` to `end`.
  void (*sum_rows)(const GroupRows& group, const RowMajorView& out, int64_t begin, int64_t end);
  /// out_i = Σ_j x_ij·b_j, for rows `begin` to `end`.
  void (*dot_bias)(const GroupRows& group, float* out, int64_t begin, int64_t end);
};

namespace AVX512 {
extern const ActLoops act_loops;
extern const NormLoops norm_loops;
extern const RowLoops row_loops;
extern const EpilogueLoops epilogue_loops;
extern const GroupLoops group_loops;
}  // namespace AVX512
namespace AVX2 {
extern const ActLoops act_loops;
extern const NormLoops norm_loops;
extern const RowLoops row_loops;
extern const EpilogueLoops epilogue_loops;
extern const GroupLoops group_loops;
}  // namespace AVX2

inline const ActLoops& act_loops(Tier tier) { return tier == Tier::avx2 ? AVX2::act_loops : AVX512::act_loops; }
inline const NormLoops& norm_loops(Tier tier) { return tier == Tier::avx2 ? AVX2::norm_loops : AVX512::norm_loops; }
inline const RowLoops& row_loops(Tier tier) { return tier == Tier::avx2 ? AVX2::row_loops : AVX512::row_loops; }

inline const EpilogueLoops& epilogue_loops(Tier tier) {
  return tier == Tier::avx2 ? AVX2::epilogue_loops : AVX512::epilogue_loops;
}

inline const GroupLoops& group_loops(Tier tier) { return tier == Tier::avx2 ? AVX2::group_loops : AVX512::group_loops; }

}  // namespace weft::kernels
