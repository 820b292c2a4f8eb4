#pragma once
#include "weft/kernels/gemm.h"
#include "weft/kernels/group_offsets.h"
#include "weft/kernels/grouped.h"
#include "weft/kernels/norm.h"
#include "weft/kernels/row_chunks.h"
#include "weft/kernels/rows.h"

// The tiers of each kernel, for the file that chooses between them. Not installed.

namespace weft::kernels {
/// Whether the CPU has an instruction set, by the engine's name for it.
bool cpu_has(const char* feature);

/// A call of `grouped_gemm` with memory for its result. Owns what it reads and writes.
struct GroupedGemmCall {
  at::Tensor x;
  GroupedMatrix w;
  bool transposed;
  GroupedMatrix bias;
  at::Tensor scales, out;
};
/// A call of `grouped_weight_gradient`.
struct GroupedWgradCall {
  at::Tensor dy, x;
  GroupedMatrix out;
  bool accumulate;
};
/// A call of `grouped_bias_gradient`; what is not wanted is undefined.
struct GroupedBiasGradCall {
  at::Tensor dy, scales;
  GroupedMatrix bias;
  at::Tensor db, ds;
};
}  // namespace weft::kernels

namespace weft::kernels::amx {
/// bfloat16 on the CPU, whole matrices of at least one value. `packed_a`: a as `pack_rows` lays it out, or undefined.
GemmResult gemm(const at::Tensor& a, const at::Tensor& b, const Epilogue& epilogue, const at::Tensor& packed_a);
/// RowChunks as `gemm_tier` wants them, with at most `max_addends` addends each, that of the epilogue included.
GemmResult gemm(const RowChunks& a, const at::Tensor& b, const Epilogue& epilogue);
int max_addends();
/// bfloat16 x, dy and w; all others of a dtype that vectors know.
void grouped_gemm(const GroupOffsets& offsets, const GroupedGemmCall& call);
void grouped_weight_gradient(const GroupOffsets& offsets, const GroupedWgradCall& call);
/// `a` has at least one value.
void pack_rows(at::Tensor a, const at::Tensor& to);
}  // namespace weft::kernels::amx

namespace weft::kernels::ref {
GemmResult gemm(const at::Tensor& a, const at::Tensor& b, Epilogue epilogue);

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

at::Tensor sum_rows(const at::Tensor& matrix);
at::Tensor scaled_mask_add(const at::Tensor& x, const at::Tensor& mask, double scale, const at::Tensor& addend);
void sum_terms(const std::vector<at::Tensor>& terms, const at::Tensor& out);
}  // namespace weft::kernels::ref

namespace weft::kernels {
/// Whether the AMX tier takes products of matrices of `dtype` on `device`, K long, N wide.
bool amx_supports(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k);
/// The tier that takes a product. Every tensor must be one that its loops can read and write.
Tier gemm_tier(const Matrix& a, const Matrix& b, const Epilogue& epilogue);

/// The AVX-512 and AVX2 tiers: the engine's product, then one vector pass for the epilogue.
GemmResult vector_gemm(Tier tier, const Matrix& a, const Matrix& b, const Epilogue& epilogue);
/// Whether vector_gemm computes the product by itself: so few values that the engine's call would cost more.
bool gemm_is_small(int64_t m, int64_t n, int64_t k);

/// One group of a call by `gemm`, of any dtype on any device.
void split_gemm(const GroupOffsets& offsets, const GroupedGemmCall& call, int64_t g);
void split_wgrad(const GroupOffsets& offsets, const GroupedWgradCall& call, int64_t g);
/// The AVX-512 and AVX2 tiers: groups of few values on bare memory, others by `gemm`.
void vector_grouped_gemm(Tier tier, const GroupOffsets& offsets, const GroupedGemmCall& call);
void vector_grouped_wgrad(Tier tier, const GroupOffsets& offsets, const GroupedWgradCall& call);
void vector_grouped_bias_grad(Tier tier, const GroupOffsets& offsets, const GroupedBiasGradCall& call);
}  // namespace weft::kernels
