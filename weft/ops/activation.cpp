#include "weft/ops/activation.h"

#include "weft/ops/registry.h"

namespace weft::ops {

using kernels::ActKind;

static std::string_view kind_name(ActKind kind) {
  switch (kind) {
    case ActKind::qgelu:
      return "QGELU";
    case ActKind::relu:
      return "ReLU";
    case ActKind::srelu:
      return "SReLU";
    case ActKind::silu:
      return "SiLU";
    case ActKind::glu:
      return "GLU";
    case ActKind::geglu:
      return "GEGLU";
    case ActKind::qgeglu:
      return "QGEGLU";
    case ActKind::reglu:
      return "ReGLU";
    case ActKind::sreglu:
      return "SReGLU";
    default:
      TORCH_CHECK_VALUE(false, "Activation: use GELU, SwiGLU, SiTUGLU or ClampedSwiGLU for this kind.");
  }
}

GELU::GELU(Options options)
    : ActivationOp("GELU", {.kind = options.approximate == GeluApproximation::tanh ? ActKind::gelu : ActKind::gelu_erf},
                   options.cache_quantized_input),
      options_(options) {}

Activation::Activation(Options options)
    : ActivationOp(kind_name(options.kind), {.kind = options.kind}, options.cache_quantized_input), options_(options) {
  TORCH_CHECK_VALUE(!act().gated(), "Activation: ", name(), " is gated; use GatedActivation.");
}

std::string_view Activation::name() const { return kind_name(options_.kind); }

GatedActivation::GatedActivation(Options options)
    : ActivationOp(kind_name(options.kind), {.kind = options.kind}, options.cache_quantized_input), options_(options) {
  TORCH_CHECK_VALUE(act().gated(), "GatedActivation: ", name(), " is not gated; use Activation.");
}

std::string_view GatedActivation::name() const { return kind_name(options_.kind); }

template <class Type>
static Register<Type> register_activation(ActKind kind, std::string doc) {
  return {std::string(kind_name(kind)), std::move(doc), {.kind = kind}, {.kind = kind}};
}

static const Register<GELU> gelu{
    "GELU",
    "y = x·(½ + ½·tanh(√(2/π)·(x + 0.044715·x³))); with approximate=\"none\" y = x/2·(1 + erf(x/√2)), the default of "
    "torch.nn.GELU.",
    {}};
static const Register<Activation> unary[] = {
    register_activation<Activation>(ActKind::qgelu, "y = x·σ(1.702·x)."),
    register_activation<Activation>(ActKind::relu, "y = max(x, 0)."),
    register_activation<Activation>(ActKind::srelu, "y = max(x, 0)²."),
    register_activation<Activation>(ActKind::silu, "y = x·σ(x)."),
};
static const std::string kHalves = ", where a is the first and b the second half of the last dimension.";
static const Register<GatedActivation> gated[] = {
    register_activation<GatedActivation>(ActKind::glu, "y = σ(a)·b" + kHalves),
    register_activation<GatedActivation>(ActKind::geglu, "y = GELU(a)·b" + kHalves),
    register_activation<GatedActivation>(ActKind::qgeglu, "y = a·σ(1.702·a)·b" + kHalves),
    register_activation<GatedActivation>(ActKind::reglu, "y = max(a, 0)·b" + kHalves),
    register_activation<GatedActivation>(ActKind::sreglu, "y = max(a, 0)²·b" + kHalves),
};

}  // namespace weft::ops
