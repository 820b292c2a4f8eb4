#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "weft/fuser/fuser.h"
#include "weft/fuser/infer.h"

namespace weft::fuser {

// The functional pair: forward and backward of a pipeline as pure functions of tensors and text. No object lives
// between the two calls, so a dispatcher op, an exported program or another process can make them.

/// The text of a pipeline and the properties of a call, e.g.
///   GELU(cache_quantized_input=false) @call(autocast=none, eval=0, joint="mlp_block", tensors="cpu:float32:gc")
/// with the joint fusions to apply (may be left out: none), and one word per tensor (x, extra inputs, parameters):
/// device, dtype, flags g (requires grad) and c (contiguous).
std::string describe(const Pipeline& pipeline, const fused::PlanKey& key);

/// The names of the library's own joint fusions that are enabled, separated by spaces.
std::string enabled_joint_rules();

/// A parsed text. The most recently used ones are cached.
struct Program {
  std::string text;
  uint32_t rules_version;
  std::shared_ptr<const Pipeline> pipeline;
  std::shared_ptr<const Plan> plan;
};
Program program(std::string_view text);

/// For each parameter of a pipeline, whether its gradient is accumulated into main_grad.
std::vector<bool> accumulates_into_main_grad(const Pipeline& pipeline);

/// Both functions check every count, size, dtype and device against `text` and raise ValueError on a mismatch.
struct Forward {
  std::vector<at::Tensor> outputs;  // the main output, then the extra outputs
  std::vector<at::Tensor> saved;    // for `backward`; undefined for an empty slot
  CallShapes shapes;
};
Forward forward(const at::Tensor& x, ops::Params params, c10::ArrayRef<at::Tensor> extras, std::string_view text);

/// Returns the gradients of x, parameters and extra inputs, in this order; undefined if not needed. `grads` belong to
/// `outputs` (undefined: zero); `x`, `params` and `extras` are those of the forward call. Slots of `saved` that
/// hold x or a parameter itself are not read; `x` and `params` are used instead. `leaf_params` are the Parameters whose
/// `main_grad` may be written; without them an operation that accumulates into main_grad raises.
std::vector<at::Tensor> backward(c10::ArrayRef<at::Tensor> grads, c10::ArrayRef<at::Tensor> saved, const at::Tensor& x,
                                 ops::Params params, c10::ArrayRef<at::Tensor> extras, std::string_view text,
                                 const ops::LeafParams* leaf_params = nullptr);

}  // namespace weft::fuser
