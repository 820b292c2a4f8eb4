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

static const char* kHalves = "a is the first and b the second half of the last dimension.";
static const char* kHalvesShape = "Input: ``(*, 2 * n)``.\nOutput: ``(*, n)``.";

static Register<Activation> register_unary(ActKind kind, std::string summary) {
  return {std::string(kind_name(kind)),
          {.summary = std::move(summary), .shape = kSameShape},
          {.kind = kind},
          {.kind = kind}};
}

static Register<GatedActivation> register_gated(ActKind kind, std::string summary) {
  return {std::string(kind_name(kind)),
          {.summary = std::move(summary), .details = kHalves, .shape = kHalvesShape, .example_shape = "[2, 4]"},
          {.kind = kind},
          {.kind = kind}};
}

static const Register<GELU> gelu{
    "GELU",
    {.summary = "Applies GELU in its tanh form: y = x·(½ + ½·tanh(√(2/π)·(x + 0.044715·x³))).",
     .details = "With approximate=\"none\" in its erf form: y = x/2·(1 + erf(x/√2)), the default of torch.nn.GELU.",
     .shape = kSameShape},
    {}};
static const Register<Activation> unary[] = {
    register_unary(ActKind::qgelu, "Applies the sigmoid approximation of GELU: y = x·σ(1.702·x)."),
    register_unary(ActKind::relu, "Applies ReLU: y = max(x, 0)."),
    register_unary(ActKind::srelu, "Applies the squared ReLU: y = max(x, 0)²."),
    register_unary(ActKind::silu, "Applies SiLU: y = x·σ(x)."),
};
static const Register<GatedActivation> gated[] = {
    register_gated(ActKind::glu, "Applies a linear unit gated by a sigmoid: y = σ(a)·b."),
    register_gated(ActKind::geglu, "Applies a linear unit gated by GELU in its tanh form: y = GELU(a)·b."),
    register_gated(ActKind::qgeglu, "Applies a linear unit gated by QGELU: y = a·σ(1.702·a)·b."),
    register_gated(ActKind::reglu, "Applies a linear unit gated by ReLU: y = max(a, 0)·b."),
    register_gated(ActKind::sreglu, "Applies a linear unit gated by the squared ReLU: y = max(a, 0)²·b."),
};

}  // namespace weft::ops
