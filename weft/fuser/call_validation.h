#pragma once
#include "weft/fused/plan_key.h"
#include "weft/fuser/pipeline.h"

namespace weft::fuser {

/// Checks what a call is given and packs its key. Tensors that weft cannot compute with or differentiate
/// (Python-dispatch subclasses, functorch wrappers, forward-mode tangents, sparse, nested, quantized) raise by name.
fused::PlanKey make_plan_key(const Pipeline& pipeline, const at::Tensor& x, ops::Params params,
                             c10::ArrayRef<at::Tensor> extras, uint64_t eval_mask);

/// Raises unless the counts are those that the pipeline takes.
void check_counts(const Pipeline& pipeline, size_t params, size_t extras);

/// "parameter 'weight' of operation 2 (BasicLinear)"
std::string param_name(const Pipeline& pipeline, int index);

/// Checks a call that `key` describes: counts, the shapes of parameters, and dtype and device of each tensor.
void check_against_key(const Pipeline& pipeline, const fused::PlanKey& key, const at::Tensor& x, ops::Params params,
                       c10::ArrayRef<at::Tensor> extras);

/// Raises unless the operation takes buffers and these can be written.
void check_buffers(const Pipeline& pipeline, const ops::Buffers& given);

/// Raises if a tensor carries a forward-mode tangent.
void reject_tangents(c10::ArrayRef<at::Tensor> tensors);

/// Raises inside torch.jit.trace and function transforms of torch.func.
void check_modes();

/// The same check for gradients that come into backward, or other tensors named by `what`; an undefined one passes.
void check_gradients(c10::ArrayRef<at::Tensor> grads, const char* what = "an incoming gradient");

}  // namespace weft::fuser
