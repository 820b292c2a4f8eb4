#include "weft/ops/swiglu.h"

#include "weft/ops/registry.h"

namespace weft::ops {

SwiGLU::SwiGLU(Options options)
    : ActivationOp(gated_act("SwiGLU", options), options.cache_quantized_input), options_(options) {}

SiTUGLU::SiTUGLU(Options options)
    : ActivationOp(gated_act("SiTUGLU", options), options.cache_quantized_input), options_(options) {}

ClampedSwiGLU::ClampedSwiGLU(Options options)
    : ActivationOp(gated_act("ClampedSwiGLU", options), options.cache_quantized_input), options_(options) {}

static OpDoc gated(std::string summary, const std::string& definitions = "") {
  return {.summary = std::move(summary),
          .details = definitions +
                     "a is the first and b the second half of the last dimension; see glu_interleave_size. "
                     "The output is not interleaved.",
          .shape = "Input: ``(*, 2 * n)``.\nOutput: ``(*, n)``.",
          .example_shape = "[2, 4]"};
}

static const Register<SwiGLU> swiglu{
    "SwiGLU", gated("Applies a linear unit gated by SiLU: y = a·σ(a)·b."), {.glu_interleave_size = 2}};
static const Register<SiTUGLU> situglu{
    "SiTUGLU",
    gated("Applies a bounded gated linear unit: y = β1·tanh(a/β1)·σ(a) · β2·tanh(b/β2)."),
    {.beta1 = 3.0, .beta2 = 12.0}};
static const Register<ClampedSwiGLU> clamped{
    "ClampedSwiGLU",
    gated("Applies a clamped linear unit gated by a scaled SiLU: y = ā·σ(alpha·ā)·b̄.",
          "ā = min(a, limit) and b̄ = clamp(b, ±limit) + glu_linear_offset. "),
    {.limit = 0.75}};

}  // namespace weft::ops
