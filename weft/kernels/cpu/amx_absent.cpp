#include "weft/kernels/attention_tiers.h"
#include "weft/kernels/tiers.h"

// What the AMX tier defines, for CPUs other than x86-64. Never called: `machine_tier` is not amx there.

namespace weft::kernels::amx {
namespace {
[[noreturn]] void reject() { TORCH_INTERNAL_ASSERT(false, "weft was built without AMX"); }
}  // namespace

GemmResult gemm(const at::Tensor&, const at::Tensor&, const Epilogue&, const at::Tensor&) { reject(); }
GemmResult gemm(const RowChunks&, const at::Tensor&, const Epilogue&) { reject(); }
int max_addends() { reject(); }
void grouped_gemm(const GroupOffsets&, const GroupedGemmCall&) { reject(); }
void grouped_weight_gradient(const GroupOffsets&, const GroupedWgradCall&) { reject(); }
void pack_rows(at::Tensor, const at::Tensor&) { reject(); }
void attention_forward(const DenseAttention&) { reject(); }
void attention_backward(const DenseAttention&, const at::Tensor&, const Qkv&) { reject(); }

}  // namespace weft::kernels::amx
