#pragma once
#include "weft/kernels/cross_entropy.h"
#include "weft/kernels/gemm.h"
#include "weft/kernels/group_offsets.h"
#include "weft/kernels/grouped.h"
#include "weft/kernels/norm.h"
#include "weft/kernels/rotary.h"
#include "weft/kernels/row_chunks.h"
#include "weft/kernels/rows.h"

// The implementations of each kernel, for the files that choose a tier. Not installed.

namespace weft::kernels {
/// Whether the CPU has `feature`, a key of at::cpu::get_cpu_capabilities().
bool cpu_has(const char* feature);
/// Whether ATen's GEMM of this dtype uses native instructions. If not, it is several times slower than one that
/// converts to float32.
bool aten_gemm_is_native(at::ScalarType dtype);

/// The arguments of `grouped_gemm`, with its output allocated. Owns every tensor that it reads and writes.
struct GroupedGemmCall {
  at::Tensor x;
  GroupedMatrix w;
  bool transposed;
  GroupedMatrix bias;
  at::Tensor scales, out;
  std::optional<GroupedQuantization> quantization = {};  // split path only
};
/// The arguments of `grouped_weight_gradient`.
struct GroupedWgradCall {
  at::Tensor dy, x;
  GroupedMatrix out;
  bool accumulate;
  std::optional<GroupedQuantization> quantization = {};  // split path only
};
/// The arguments of `grouped_bias_gradient`, with its outputs allocated; undefined outputs are not computed.
struct GroupedBiasGradCall {
  at::Tensor dy, scales;
  GroupedMatrix bias;
  at::Tensor db, ds;
};
}  // namespace weft::kernels

namespace weft::kernels::amx {
/// Takes bfloat16 on the CPU, with at least one element in A and in B. `packed_a`: A as packed by `pack_rows`, or
/// undefined.
GemmResult gemm(const at::Tensor& a, const at::Tensor& b, const Epilogue& epilogue, const at::Tensor& packed_a);
/// Takes chunks for which `gemm_tier` returns amx, each with at most `max_addends` addends including the epilogue's.
GemmResult gemm(const RowChunks& a, const at::Tensor& b, const Epilogue& epilogue);
int max_addends();
/// x, dy and w are bfloat16; the other tensors are float32, bfloat16 or float16.
void grouped_gemm(const GroupOffsets& offsets, const GroupedGemmCall& call);
void grouped_weight_gradient(const GroupOffsets& offsets, const GroupedWgradCall& call);
/// `a` must have at least one element.
void pack_rows(at::Tensor a, const at::Tensor& to);
}  // namespace weft::kernels::amx

namespace weft::kernels::ref {
GemmResult gemm(const at::Tensor& a, const at::Tensor& b, Epilogue epilogue);
GemmResult apply_epilogue(const at::Tensor& product, const Epilogue& epilogue, at::ScalarType dtype);

at::Tensor activation_forward(const Act& act, const at::Tensor& x);
at::Tensor activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x);
ActivationColumnSums activation_backward_column_sums(const Act& act, const at::Tensor& dy, const at::Tensor& x);
at::Tensor scaled_activation_forward(const Act& act, const at::Tensor& x, const at::Tensor& scales);
std::pair<at::Tensor, at::Tensor> scaled_activation_backward(const Act& act, const at::Tensor& dy, const at::Tensor& x,
                                                             const at::Tensor& scales, bool needs_dx, bool needs_ds);

LayerNormForward layer_norm_forward(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, double eps);
NormGrads layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean, const at::Tensor& rstd,
                              const at::Tensor& gamma, std::array<bool, 3> output_mask, const at::Tensor& addend);
RmsNormForward rms_norm_forward(const at::Tensor& x, const at::Tensor& gamma, double eps);
NormGrads rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd, const at::Tensor& gamma,
                            std::array<bool, 2> output_mask, const at::Tensor& addend);
L2NormForward l2_norm_forward(const at::Tensor& x, double eps);
at::Tensor l2_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rnorm,
                            const at::Tensor& addend);

at::Tensor rotary(const at::Tensor& x, const RotaryTables& tables, const RotaryHeads& heads, RotaryDirection direction);
RotaryTables rotary_table_gradients(const at::Tensor& dy, const at::Tensor& x, const RotaryHeads& heads);

at::Tensor cross_entropy_partials(const at::Tensor& logits, const at::Tensor& targets, const CrossEntropyLoss& loss);
at::Tensor cross_entropy_backward(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& targets,
                                  const at::Tensor& statistics, const CrossEntropyLoss& loss);

at::Tensor sum_rows(const at::Tensor& matrix);
at::Tensor scaled_mask_add(const at::Tensor& x, const at::Tensor& mask, double scale, const at::Tensor& addend);
void sum_terms(const std::vector<at::Tensor>& terms, const at::Tensor& out);
}  // namespace weft::kernels::ref

namespace weft::kernels {
/// Why a machine with AMX does not use it for `dtype` on `device`; empty if it does.
std::string amx_rejection(c10::DeviceType device, at::ScalarType dtype);
/// `next`, with the reason for which a better tier does not run before its own.
TierChoice after_rejection(const std::string& reason, TierChoice next);

/// Whether the AMX tier runs a GEMM with B [K, N] of `dtype` on `device`.
bool amx_supports(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k);
/// The tier of a GEMM: `ref` unless the loops can read and write every tensor.
Tier gemm_tier(const Matrix& a, const Matrix& b, const Epilogue& epilogue);

/// The AVX-512 and AVX2 tiers: a GEMM of MKL or oneDNN, then one vector pass for the epilogue.
GemmResult vector_gemm(Tier tier, const Matrix& a, const Matrix& b, const Epilogue& epilogue);
/// As `apply_epilogue`.
GemmResult vector_epilogue(Tier tier, const at::Tensor& product, const Epilogue& epilogue, at::ScalarType dtype);
/// Whether vector_gemm uses its own loop: for a small GEMM, the library call costs more than the work.
bool gemm_is_small(int64_t m, int64_t n, int64_t k);

/// Runs group g by one call of `gemm`, for any dtype and device.
void split_gemm(const GroupOffsets& offsets, const GroupedGemmCall& call, int64_t g);
void split_wgrad(const GroupOffsets& offsets, const GroupedWgradCall& call, int64_t g);
/// The AVX-512 and AVX2 tiers: small groups run in weft's loops, the others by `gemm`.
void vector_grouped_gemm(Tier tier, const GroupOffsets& offsets, const GroupedGemmCall& call);
void vector_grouped_wgrad(Tier tier, const GroupOffsets& offsets, const GroupedWgradCall& call);
void vector_grouped_bias_grad(Tier tier, const GroupOffsets& offsets, const GroupedBiasGradCall& call);
}  // namespace weft::kernels
