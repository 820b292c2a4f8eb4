#include "weft/ops/swiglu.h"

#include "weft/ops/registry.h"

namespace weft::ops {

SwiGLU::SwiGLU(Options options)
    : ActivationOp("SwiGLU", gated_act("SwiGLU", options), options.cache_quantized_input), options_(options) {}

SiTUGLU::SiTUGLU(Options options)
    : ActivationOp("SiTUGLU", gated_act("SiTUGLU", options), options.cache_quantized_input), options_(options) {}

ClampedSwiGLU::ClampedSwiGLU(Options options)
    : ActivationOp("ClampedSwiGLU", gated_act("ClampedSwiGLU", options), options.cache_quantized_input),
      options_(options) {}

static const std::string kHalves = ", where a is the first and b the second half of the last dimension.";
static const Register<SwiGLU> swiglu{"SwiGLU", "y = a·σ(a)·b" + kHalves, {.glu_interleave_size = 2}};
static const Register<SiTUGLU> situglu{
    "SiTUGLU", "y = β1·tanh(a/β1)·σ(a) · β2·tanh(b/β2)" + kHalves, {.beta1 = 3.0, .beta2 = 12.0}};
static const Register<ClampedSwiGLU> clamped{
    "ClampedSwiGLU",
    "y = ā·σ(alpha·ā)·b̄, ā = min(a, limit), b̄ = clamp(b, ±limit) + glu_linear_offset" + kHalves,
    {.limit = 0.75}};

}  // namespace weft::ops
