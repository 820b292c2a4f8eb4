#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "weft/fuser/fuser.h"
#include "weft/fuser/infer.h"

namespace weft::fuser {

/// The two passes of a pipeline as plain functions of tensors and text: no object lives between them, so a dispatcher
/// op, an exported program or another process can call them.
///
/// `text` is what `describe` returns: the pipeline and the kind of call, e.g.
///   GELU(cache_quantized_input=false) @call(autocast=none, eval=0, tensors="cpu:float32:gc")
/// with one word per tensor (x, extra inputs, parameters): device, dtype, g: a gradient is wanted, c: contiguous.
std::string describe(const Pipeline& pipeline, const fused::PlanKey& key);

/// A described pipeline, read; the last few are kept.
struct Program {
  std::string text;
  uint32_t rules_version;
  std::shared_ptr<const Pipeline> pipeline;
  std::shared_ptr<const Plan> plan;
};
Program program(std::string_view text);

/// Every count, size, dtype and device is checked against `text` before it is used; a mismatch raises ValueError.
struct Forward {
  std::vector<at::Tensor> outputs;  // the main one, then the extra ones
  std::vector<at::Tensor> saved;    // for `backward`; undefined where a slot stays empty
  CallShapes shapes;
};
Forward forward(const at::Tensor& x, ops::Params params, c10::ArrayRef<at::Tensor> extras, std::string_view text);

/// Gradients of x, parameters and extra inputs, in this order; undefined where none was wanted. `grads` belong to
/// `outputs`, an undefined one is zero; `x`, `params` and `extras` are those of the forward call. A slot of `saved`
/// that keeps x itself is not read: x stands in for it. `leaf_params` are the Parameters whose `main_grad` may be
/// written; without them an operation that accumulates there raises.
std::vector<at::Tensor> backward(c10::ArrayRef<at::Tensor> grads, c10::ArrayRef<at::Tensor> saved, const at::Tensor& x,
                                 ops::Params params, c10::ArrayRef<at::Tensor> extras, std::string_view text,
                                 const ops::LeafParams* leaf_params = nullptr);

}  // namespace weft::fuser
