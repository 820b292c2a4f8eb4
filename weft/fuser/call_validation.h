#pragma once
#include "weft/fused/plan_key.h"
#include "weft/fuser/pipeline.h"

namespace weft::fuser {

/// Validates the tensors of a call and packs its plan key. Raises, naming the tensor, for unsupported ones
/// (Python-dispatch subclasses, functorch wrappers, forward-mode tangents, sparse, nested, quantized).
fused::PlanKey make_plan_key(const Pipeline& pipeline, const at::Tensor& x, ops::Params params,
                             c10::ArrayRef<at::Tensor> extras, uint64_t eval_mask);

/// Raises ValueError unless the pipeline takes this many parameters and extra inputs.
void check_counts(const Pipeline& pipeline, size_t params, size_t extras);

/// "parameter 'weight' of Sequential[2] Linear"
std::string param_name(const Pipeline& pipeline, int index);

/// Validates a call against `key`: counts, parameter shapes, and the dtype and device of each tensor.
void check_against_key(const Pipeline& pipeline, const fused::PlanKey& key, const at::Tensor& x, ops::Params params,
                       c10::ArrayRef<at::Tensor> extras);

/// Raises unless the operation takes buffers and these are writable.
void check_buffers(const Pipeline& pipeline, const ops::Buffers& given);

/// Raises if a tensor carries a forward-mode tangent.
void reject_tangents(c10::ArrayRef<at::Tensor> tensors);

/// Raises inside torch.jit.trace and torch.func transforms.
void check_modes();

/// The same checks for the gradients passed to backward, or for other tensors, named `what` in errors. Undefined
/// tensors pass.
void check_gradients(c10::ArrayRef<at::Tensor> grads, const char* what = "an incoming gradient");

}  // namespace weft::fuser
