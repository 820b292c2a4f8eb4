#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>

#include "weft/kernels/activation.h"
#include "weft/kernels/rotary.h"
#include "weft/kernels/tier.h"

// Loops that are compiled once per instruction set and take raw pointers. Rows are contiguous; dtypes are float32,
// bfloat16 and float16; pointers that are not needed are null. Each call handles rows [begin, end), so that threads can
// split the work.

namespace weft::kernels {

/// A row of x has `blocks` blocks of `columns` elements; of a gated kind, each block is `columns` of a, then of b.
struct ActCall {
  Act act = {};
  int64_t blocks = 1, columns = 0;
  at::ScalarType dtype = at::kFloat;  // of x and out
  const void* x = nullptr;
  void* out = nullptr;  // act(x) or dx
  at::ScalarType dy_dtype = at::kFloat;
  const void* dy = nullptr;
  const float* scales = nullptr;  // per row: factor of act(x), or of dy
  float* ds = nullptr;            // per row: Σ_columns dy·act(x)
  float* column_sums = nullptr;   // per column of x: Σ_rows dx is added
};
struct ActLoops {
  void (*forward)(const ActCall& call, int64_t begin, int64_t end);
  void (*backward)(const ActCall& call, int64_t begin, int64_t end);
};

/// A row has `columns` elements. `centered`: layer norm. Otherwise the mean is 0: RMS norm, or L2 norm without gamma
/// and with divisor 1.
struct NormCall {
  int64_t columns = 0;
  double divisor = 1, eps = 0;  // rstd = 1/√(Σ(x - mean)²/divisor + eps)
  bool centered = false;
  at::ScalarType dtype = at::kFloat;  // of x and out
  const void* x = nullptr;
  void* out = nullptr;  // y or dx; dx may alias dy
  const float *gamma = nullptr, *beta = nullptr;
  float *mean = nullptr, *rstd = nullptr;  // written by forward if not null, read by backward
  at::ScalarType dy_dtype = at::kFloat, addend_dtype = at::kFloat;
  const void *dy = nullptr, *addend = nullptr;  // dx = … + addend
  float *dgamma = nullptr, *dbeta = nullptr;    // sums over rows are added
};
struct NormLoops {
  void (*forward)(const NormCall& call, int64_t begin, int64_t end);
  void (*backward)(const NormCall& call, int64_t begin, int64_t end);
};

/// Rows of logits over the classes of one rank (kernels/cross_entropy.h).
struct CrossEntropyCall {
  int64_t columns = 0, first_class = 0, ignore_index = 0;
  double inv_classes = 1;  // 1 / number of classes over all ranks
  double label_smoothing = 0, z_loss = 0;
  at::ScalarType dtype = at::kFloat;  // of logits and out
  const void* logits = nullptr;
  const int64_t* targets = nullptr;
  float* partials = nullptr;                           // forward: 4 per row
  const float *statistics = nullptr, *grad = nullptr;  // backward: 2 and 1 per row
  void* out = nullptr;                                 // backward: dx
};
struct CrossEntropyLoops {
  void (*forward)(const CrossEntropyCall& call, int64_t begin, int64_t end);
  void (*backward)(const CrossEntropyCall& call, int64_t begin, int64_t end);
};

/// out = x·mask·scale + addend, for elements [begin, end).
struct MaskCall {
  at::ScalarType dtype = at::kFloat, addend_dtype = at::kFloat;
  const void *x = nullptr, *addend = nullptr;
  const bool* mask = nullptr;
  void* out = nullptr;
  float scale = 1;
};
/// A row-major matrix with row stride `ld` in elements.
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
  /// sums[j] += Σ x[i, j] over rows [begin, end).
  void (*add_rows)(at::ScalarType dtype, const void* x, int64_t columns, float* sums, int64_t begin, int64_t end);
  /// out[i] = values[i], rounded to `dtype`.
  void (*round)(at::ScalarType dtype, const float* values, void* out, int64_t count);
  void (*scaled_mask_add)(const MaskCall& call, int64_t begin, int64_t end);
  void (*sum_terms)(const SumCall& call, int64_t begin, int64_t end);
};

/// An `Epilogue` (kernels/gemm.h) for a block of rows of P. `product` may alias `pre_act` or `out`.
struct EpilogueCall {
  int64_t columns = 0;  // of P
  RowMajorView product;
  float scale = 1;
  RowMajorView bias;  // one row
  RowMajorView pre_act;
  at::ScalarType step_dtype = at::kFloat;  // v is rounded to it before an activation
  std::optional<Act> act = {}, act_grad = {};
  RowMajorView act_input, act_output;
  float* column_sums = nullptr;  // Σ_rows is added
  RowMajorView addend, out;
};

/// A matrix with any strides.
struct StridedMatrix {
  const void* data;
  int64_t rows, columns, row_stride, column_stride;
};

struct EpilogueLoops {
  void (*apply)(const EpilogueCall& call, int64_t begin, int64_t end);
  /// p = A B for small matrices; p is float32 [A.rows, B.columns], `scratch` has the size of B.
  void (*small_gemm)(at::ScalarType dtype, const StridedMatrix& a, const StridedMatrix& b, float* scratch,
                     const RowMajorView& p);
};

/// Rows of one group (kernels/grouped.h), with the group's bias (one row) and one scale per row, `scales.ld` elements
/// apart.
struct GroupRows {
  int64_t rows = 0, columns = 0;
  RowMajorView x, bias, scales;
};
/// The output of a group's GEMM: out_ij = p_ij + s_i·b_j, or out_ij += … with `accumulate`.
struct GroupOutput {
  RowMajorView out, bias, scales;
  bool accumulate = false;
};
struct GroupLoops {
  /// A B for small matrices; `scratch` has the size of B.
  void (*gemm)(at::ScalarType dtype, const StridedMatrix& a, const StridedMatrix& b, float* scratch,
               const GroupOutput& to);
  /// out_j = Σ_i s_i·x_ij, for columns [begin, end).
  void (*sum_rows)(const GroupRows& group, const RowMajorView& out, int64_t begin, int64_t end);
  /// out_i = Σ_j x_ij·b_j, for rows [begin, end).
  void (*dot_bias)(const GroupRows& group, float* out, int64_t begin, int64_t end);
};

/// The arguments of `rotary`: row r has position r / rows_per_position modulo `positions`.
struct RotaryCall {
  RotaryHeads heads;
  int64_t positions = 1, rows_per_position = 1;
  at::ScalarType dtype = at::kFloat;  // of x and out
  const void* x = nullptr;
  void* out = nullptr;
  const float *cos = nullptr, *sin = nullptr;  // [positions, pairs]
  float sign = 1;                              // of sin
};
using RotaryLoop = void (*)(const RotaryCall& call, int64_t begin, int64_t end);

// An instruction set defines the loops below in a namespace of its own. WEFT_LOOPS(tier, name) are those of a tier.
#ifdef __x86_64__
#define WEFT_INSTRUCTION_SETS(declare) declare(AVX512) declare(AVX2)
#define WEFT_LOOPS(tier, name) ((tier) == Tier::avx2 ? AVX2::name : AVX512::name)
#else
#define WEFT_INSTRUCTION_SETS(declare) declare(NEON)
#define WEFT_LOOPS(tier, name) (static_cast<void>(tier), NEON::name)
#endif

#define WEFT_DECLARE(set)                             \
  namespace set {                                     \
  extern const ActLoops act_loops;                    \
  extern const NormLoops norm_loops;                  \
  extern const CrossEntropyLoops cross_entropy_loops; \
  extern const RowLoops row_loops;                    \
  extern const EpilogueLoops epilogue_loops;          \
  extern const GroupLoops group_loops;                \
  extern const RotaryLoop rotary_loop;                \
  }
WEFT_INSTRUCTION_SETS(WEFT_DECLARE)
#undef WEFT_DECLARE

inline const ActLoops& act_loops(Tier tier) { return WEFT_LOOPS(tier, act_loops); }
inline const NormLoops& norm_loops(Tier tier) { return WEFT_LOOPS(tier, norm_loops); }
inline const CrossEntropyLoops& cross_entropy_loops(Tier tier) { return WEFT_LOOPS(tier, cross_entropy_loops); }
inline const RowLoops& row_loops(Tier tier) { return WEFT_LOOPS(tier, row_loops); }
inline const EpilogueLoops& epilogue_loops(Tier tier) { return WEFT_LOOPS(tier, epilogue_loops); }
inline const GroupLoops& group_loops(Tier tier) { return WEFT_LOOPS(tier, group_loops); }
inline RotaryLoop rotary_loop(Tier tier) { return WEFT_LOOPS(tier, rotary_loop); }

}  // namespace weft::kernels
