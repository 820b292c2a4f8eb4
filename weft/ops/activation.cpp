#include "weft/ops/activation.h"

#include "weft/ops/registry.h"

namespace weft::ops {

using kernels::ActKind;

/// The kinds that `Activation` implements. The others have more options and a class each.
static constexpr std::pair<ActKind, std::string_view> kKindNames[] = {
    {ActKind::qgelu, "QGELU"},   {ActKind::relu, "ReLU"},   {ActKind::srelu, "SReLU"},
    {ActKind::silu, "SiLU"},     {ActKind::glu, "GLU"},     {ActKind::geglu, "GEGLU"},
    {ActKind::qgeglu, "QGEGLU"}, {ActKind::reglu, "ReGLU"}, {ActKind::sreglu, "SReGLU"}};

static std::string_view kind_name(ActKind kind) {
  for (const auto& [known, name] : kKindNames)
    if (known == kind) return name;
  TORCH_CHECK_VALUE(false, "Activation: use GELU, SwiGLU, SiTUGLU, ClampedSwiGLU or ScaledTanhSReLU for this kind.");
}

GELU::GELU(Options options)
    : ActivationOp({.kind = options.approximate == GeluApproximation::tanh ? ActKind::gelu : ActKind::gelu_erf},
                   options.cache_quantized_input),
      options_(options) {}

Activation::Activation(Options options)
    : ActivationOp({.kind = options.kind}, options.cache_quantized_input), options_(options) {
  kind_name(options.kind);  // raises for a kind that has a class of its own
}

std::string_view Activation::name() const { return kind_name(options_.kind); }

static const char* kGatedDetails = "a is the first and b the second half of the last dimension.";
static const char* kGatedShape = "Input: ``(*, 2 * n)``.\nOutput: ``(*, n)``.";

static Register<Activation> register_activation(ActKind kind, std::string summary) {
  OpDoc doc{.summary = std::move(summary), .shape = kSameShape};
  if (kernels::Act{.kind = kind}.gated())
    doc = {.summary = doc.summary, .details = kGatedDetails, .shape = kGatedShape, .example_shape = "[2, 4]"};
  return {std::string(kind_name(kind)), std::move(doc), /*sample=*/{.kind = kind}, /*base=*/{.kind = kind}};
}

static const Register<GELU> gelu{
    "GELU",
    {.summary = "Applies GELU in its tanh form: y = x·(½ + ½·tanh(√(2/π)·(x + 0.044715·x³))).",
     .details = "With approximate=\"none\" in its erf form: y = x/2·(1 + erf(x/√2)), the default of torch.nn.GELU.",
     .shape = kSameShape},
    {}};
static const Register<Activation> registered[] = {
    register_activation(ActKind::qgelu, "Applies the sigmoid approximation of GELU: y = x·σ(1.702·x)."),
    register_activation(ActKind::relu, "Applies ReLU: y = max(x, 0)."),
    register_activation(ActKind::srelu, "Applies the squared ReLU: y = max(x, 0)²."),
    register_activation(ActKind::silu, "Applies SiLU: y = x·σ(x)."),
    register_activation(ActKind::glu, "Applies a linear unit gated by a sigmoid: y = σ(a)·b."),
    register_activation(ActKind::geglu, "Applies a linear unit gated by GELU in its tanh form: y = GELU(a)·b."),
    register_activation(ActKind::qgeglu, "Applies a linear unit gated by QGELU: y = a·σ(1.702·a)·b."),
    register_activation(ActKind::reglu, "Applies a linear unit gated by ReLU: y = max(a, 0)·b."),
    register_activation(ActKind::sreglu, "Applies a linear unit gated by the squared ReLU: y = max(a, 0)²·b."),
};

}  // namespace weft::ops
